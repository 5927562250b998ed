"""Tests the bytes that a step moves between device, host memory and files, by what a rank has allocated."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import make_run
from support.each import each
from torch import nn

import megazero
from megazero.memory.block_file import AlignedMemory, BlockIO
from megazero.memory.file_states import FileStates
from megazero.memory.homes import HostHome
from megazero.memory.ledger_interface import NullLedger
from megazero.parallel.param_spec import Unit, spec_of
from megazero.units import format_bytes
from megazero.zero.home_traffic import HomeTraffic, home_traffic
from megazero.zero.layout import LayoutRules, Slot, build_layout
from megazero.zero.plan import resolve
from megazero.zero.shards import Shards

NUMEL, RANKS, MICRO_BATCHES = 1 << 13, 2, 3
ADAM = ("exp_avg", "exp_avg_sq")


def traffic_of(folder: Path, kinds: Sequence[str], num_passes: int, **settings: Any) -> HomeTraffic:
    """Return what a rank of two moves with a parameter of eight buckets, whose states of these kinds are in files."""
    config = make_run(precision="bf16", offload_optimizer="nvme", nvme_path=folder, **settings)
    parameter = nn.Parameter(torch.zeros(NUMEL, dtype=torch.bfloat16))
    slot = Slot(spec_of("p", parameter), parameter.dtype, config.zero.zero_stage == 3, 0)
    files = FileStates(
        folder,
        num_buffers=4,
        memory=AlignedMemory(is_pinned=False, ledger=NullLedger()),
        io=BlockIO(block_bytes=1 << 20, queue_depth=1),
    )
    shards = Shards(
        resolve(config.zero, config.precision),
        build_layout([Unit("u", ("p",))], [slot], LayoutRules(RANKS, NUMEL // 8)),
        1,
        {"p": parameter},
        moments=kinds,
        kinds_in_files=kinds,
        host=HostHome(torch.device("cpu")),
        files=files,
    )
    found = home_traffic(shards, (), MICRO_BATCHES, num_passes=num_passes)
    files.close()
    return found


@each("stage", [1, 2, 3])
def test_gradients_in_files(stage: int, tmp_path: Path) -> None:
    """They go there by way of host memory, and are read for norm and update, and for further sums."""
    shared = {"zero_stage": stage, "offload_optimizer_ratio": 0.75, "offload_optimizer_nvme_ratio": 0.5}
    moved = {**shared, "offload_gradients_nvme": True}
    before, after = (traffic_of(tmp_path, ADAM, 0, **settings) for settings in (shared, moved))
    share = NUMEL // RANKS * 3 // 8
    reductions = 1 if stage == 1 else MICRO_BATCHES
    away = 2 * 2 * share  # the bytes of gradients, and of new weights
    assert before[:2] == after[:2] == (reductions * away, reductions * away)
    assert before[2:] == (12 * share, 12 * share)
    assert after[2:] == (before.written + reductions * 2 * share, before.read + (reductions + 1) * 2 * share)
    lamb = traffic_of(tmp_path, ADAM, 1, **moved)
    assert lamb[2:] == (after.written + 8 * share, after.read + (12 + 2) * share), "moments twice, all read twice"
    adafactor = traffic_of(tmp_path, (), 2, **moved)
    assert adafactor[2:] == (after.written - 8 * share, after.read + (2 * 4 - 8 + 2 * 2) * share)


BOTH = {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}
# {what is special: (settings, whether half of the model is frozen)}
CASES: Mapping[str, tuple[dict[str, Any], bool]] = {
    "frozen": ({**BOTH, "offload_param": "nvme", "offload_param_buffer_count": 1}, True),
    "in 8 bits": ({**BOTH, "zero_quantized_nontrainable_weights": True, "zero_quantized_block_size": 32}, True),
    "partly whole": ({**BOTH, "param_persistence_threshold": 20}, False),
    "a share": ({**BOTH, "offload_optimizer_ratio": 0.3}, False),
    "a share in files": ({**BOTH, "offload_optimizer": "nvme", "offload_optimizer_ratio": 0.6}, False),
    "no optimizer": ({"zero_stage": 3, "offload_param": "nvme", "offload_param_buffer_count": 1}, False),
}


@each("name", CASES)
def test_the_price_is_of_the_bytes_that_a_step_moves(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With no memory but that of a use, each unit is gathered for every forward and every backward."""
    settings, is_frozen = CASES[name]
    trains = name != "no optimizer"
    model = nn.Sequential(*(nn.Linear(12, 12, dtype=torch.bfloat16) for _ in range(4)))
    model[:2].requires_grad_(not is_frozen)
    memory = {"param_persistence_threshold": 0, "max_live_parameters": 0, "prefetch_bucket_size": 0}
    folder = {"nvme_path": str(tmp_path)} if "nvme" in settings.values() else {}
    config = {"zero": {**memory, "reduce_bucket_size": 64, **settings, **folder}, "precision": {"precision": "bf16"}}
    if trains:
        config |= {"optimizer": {"type": "AdamW", "lr": 0.01}, "gradient_accumulation_steps": 2}
    engine = megazero.initialize(model, config)
    announced = engine.zero_engine.home_traffic(2 if trains else 1)
    meter = engine.mesh.meter
    for _ in range(2):
        meter.reset()
        for _ in range(2 if trains else 1):
            loss = engine(torch.ones(2, 12, dtype=torch.bfloat16, requires_grad=trains)).float().square().mean()
            if trains:
                engine.backward(loss)
        if trains:
            engine.step()
    moved = HomeTraffic(
        *(meter.count("host", way).nbytes for way in ("store", "load")),
        *(meter.count("file", way).nbytes for way in ("write", "read")),
    )
    assert moved[:3] == announced[:3] and moved.loaded > 0
    assert announced.read / 2 <= moved.read <= announced.read, "a block that is still in a buffer is not read again"
    if "a share" in name:
        assert 0 < engine.zero_engine.num_updated_by_host < 4 * 160
    told = f"{format_bytes(moved.stored)} to host memory and {format_bytes(moved.loaded)} back, "
    assert capsys.readouterr().err.count(told) == 1
    engine.close()
