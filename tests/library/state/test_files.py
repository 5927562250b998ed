"""Tests an engine whose states live in files as a user sees it: values, checkpoints, memory, and a kill in a step."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from support.each import each
from support.processes import mesh_in_worker, run_ranks
from support.warm_python import warm_python
from torch import Tensor, nn

import megazero
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.library.state.access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from megazero.zero.parameters.gathered import GatheredParameters
from megazero.zero.plan import Home

ROOT = Path(__file__).parents[3]
WIDTH, SAMPLES = 12, 8
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
BF16 = MappingProxyType({"precision": "bf16"})
# By which the first step overflows, and later ones do not.
FP16 = MappingProxyType({"precision": "fp16", "initial_loss_scale": 2.0**17, "hysteresis": 1})
PRECISIONS = (BF16, MappingProxyType({"precision": "fp32"}), MappingProxyType({"precision": "fp64"}))
HOMES = ("none", "cpu", "nvme")
GRADIENTS = MappingProxyType({"offload_gradients_nvme": True})

# By name: what the configuration asks for, or what is given; and a kind of state that the optimizer keeps.
OPTIMIZERS: Mapping[str, tuple[Make | None, str]] = {
    "AdamW of the configuration": (None, "exp_avg_sq"),
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), "exp_avg"),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), "momentum_buffer"),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1), "sum"),
}


@each("stage", (1, 2, 3))
def test_the_shares_of_mixed_homes_are_met_without_limits_of_messages(stage: int, tmp_path: Path) -> None:
    """A model that would be one bucket is cut into as many as the shares need."""
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(8)]
    zero = {"zero_stage": stage, "offload_optimizer": "nvme", "nvme_path": str(tmp_path)}
    zero |= {"offload_optimizer_ratio": 0.7, "offload_optimizer_nvme_ratio": 0.5}
    config = {"zero": zero, "precision": BF16, "optimizer": {"type": "AdamW", "lr": 0.01}}
    engine = megazero.initialize(nn.Sequential(*layers), config)
    numel = {home: engine.zero_engine.model_state_bytes(home).master // 4 for home in Home}
    total = 8 * WIDTH * (WIDTH + 1)
    assert total <= sum(numel.values()) <= 1.1 * total
    for home, share in {Home.DEVICE: 0.3, Home.HOST: 0.35, Home.FILE: 0.35}.items():
        assert abs(numel[home] / sum(numel.values()) - share) <= 1 / 16
    engine.close()


def homes(stage: int, home: str, folder: Path) -> dict[str, Any]:
    """Return the settings of states at home there; files have sub-groups of which none is a parameter."""
    settings: dict[str, Any] = {"zero_stage": stage, "reduce_bucket_size": 200}
    if home != "none":
        settings |= {"offload_optimizer": home, "sub_group_size": 70}
    if stage == 3 and home != "none":
        settings |= {"offload_param": home}
    return settings | ({"nvme_path": str(folder / "states")} if home == "nvme" else {})


def make_engine(
    stage: int,
    home: str,
    folder: Path,
    *,
    optimizer: Make | None = None,
    precision: Mapping[str, Any] = BF16,
    accumulation: int = 1,
    freezes: bool = False,
    mesh: Any = None,
    **zero: Any,
) -> DataParallelEngine:
    """freezes: whether the layer in the middle stays as it is."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    model[2].requires_grad_(not freezes)
    config: dict[str, Any] = {"zero": {**homes(stage, home, folder), **zero}, "precision": dict(precision)}
    config["gradient_accumulation_steps"] = accumulation
    if optimizer is None:
        config["optimizer"] = {"type": "AdamW", "lr": 0.01, "params": {"weight_decay": 0.1}}
        return megazero.initialize(model, config, mesh=mesh)
    return megazero.initialize(model, config, optimizer=optimizer(list(model.parameters())), mesh=mesh)


def train(engine: DataParallelEngine, first: int, steps: int) -> list[float]:
    """Take steps, each on this rank's part of a batch; return its losses."""
    dp, found = engine.mesh.axis("dp"), []
    dtype = next(engine.module.parameters()).dtype
    for step in range(first, first + steps):
        batch = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = engine(batch.chunk(dp.size)[dp.rank]).float().square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def figures(engine: DataParallelEngine) -> list[tuple[str, Tensor]]:
    """Return working and master weights and the optimizer's state, whole."""
    found = [(name, value.clone()) for name, value in engine.state_dict().items()]
    with GatheredParameters(engine.module):
        found += [(name, value.detach().clone()) for name, value in engine.module.named_parameters()]
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter)
        assert (master is not None) == parameter.requires_grad
        found += [] if master is None else [(name, master.clone())]
    for number, state in engine.optimizer.state_dict()["state"].items():
        found += [(f"{number} {kind}", torch.as_tensor(value).clone()) for kind, value in state.items()]
    return found


def same(ours: list[tuple[str, Tensor]], theirs: list[tuple[str, Tensor]]) -> bool:
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    differing = [name for (name, one), (_, other) in zip(ours, theirs, strict=True) if not torch.equal(one, other)]
    assert differing == []
    return len(ours) > 0


def values_through_every_door(engine: DataParallelEngine, kind: str) -> Iterator[list[tuple[str, Tensor]]]:
    """Read and write states in every way that users have, with steps between; yield what was read."""
    train(engine, 0, 2)
    yield figures(engine)
    first = next(engine.module.parameters())
    master, state = safe_get_full_fp32_param(first), safe_get_full_optimizer_state(first, kind)
    assert master is not None and state is not None and bool(state.any())
    safe_set_full_fp32_param(first, master * 1.5 + 0.1)
    safe_set_full_optimizer_state(first, state.abs() * 2 + 0.25, kind)
    changed = [safe_get_full_fp32_param(first), safe_get_full_optimizer_state(first, kind)]
    assert changed[0] is not None and torch.equal(changed[0], (master * 1.5 + 0.1))
    assert changed[1] is not None and torch.equal(changed[1], state.abs() * 2 + 0.25)
    yield figures(engine)
    train(engine, 2, 2)
    last = list(engine.module.parameters())[-2:]
    with GatheredParameters(last, modifier_rank=0):
        for parameter in last:
            parameter.data.mul_(0.5).add_(0.125)
    yield figures(engine)
    train(engine, 4, 2)
    weights = {name: value.clone() + 0.0625 for name, value in engine.state_dict().items()}
    engine.load_state_dict(weights)
    for name, value in engine.state_dict().items():
        assert torch.equal(value, weights[name])
    yield figures(engine)
    train(engine, 6, 2)
    yield figures(engine)


@each(
    ("stage", "optimizer"),
    [*((1, name) for name in OPTIMIZERS), (2, "AdamW"), (2, "SGD"), (3, "AdamW of the configuration"), (3, "Adagrad")],
)
def test_values_are_those_of_an_engine_on_the_device(stage: int, optimizer: str, tmp_path: Path) -> None:
    made, kind = OPTIMIZERS[optimizer]
    files, plain = (make_engine(stage, home, tmp_path, optimizer=made) for home in ("nvme", "none"))
    assert files.zero_engine.model_state_bytes().master == 0 < plain.zero_engine.model_state_bytes().master
    for ours, theirs in zip(
        values_through_every_door(files, kind), values_through_every_door(plain, kind), strict=True
    ):
        assert same(ours, theirs)
    assert os.listdir(tmp_path / "states") == []
    files.close()


def test_an_optimizer_without_state_updates_weights_in_files(tmp_path: Path) -> None:
    losses = []
    for home in ("none", "nvme"):
        engine = make_engine(1, home, tmp_path, optimizer=lambda p: torch.optim.SGD(p, lr=0.05))
        losses.append(train(engine, 0, 4))
        engine.close()
    assert losses[0] == losses[1] and len(set(losses[0])) == 4


@each(("precision", "freezes"), [(FP16, False), ({"precision": "fp32"}, False), (BF16, True)])
def test_values_in_other_number_formats_and_of_frozen_parameters(
    precision: Mapping[str, Any], freezes: bool, tmp_path: Path
) -> None:
    files, plain = (make_engine(3, home, tmp_path, precision=precision, freezes=freezes) for home in ("nvme", "none"))
    assert [files.zero_engine.model_state_bytes(home).parameters > 0 for home in Home] == [False, False, True]
    for ours, theirs in zip(
        values_through_every_door(files, "exp_avg"), values_through_every_door(plain, "exp_avg"), strict=True
    ):
        assert same(ours, theirs)
    assert files.skipped_steps == plain.skipped_steps
    assert (0 < plain.skipped_steps < plain.global_steps) == (precision is FP16)
    files.close()


@each("pipeline", [{}, {"offload_pipeline_write": False}, {"offload_pipeline_read": False}, {"aio_queue_depth": 1}])
@each("gradients", [{}, GRADIENTS])
def test_the_number_of_buffers_is_constant(
    gradients: Mapping[str, Any], pipeline: Mapping[str, Any], tmp_path: Path
) -> None:
    """Also where a sub-group comes to its update before there was a buffer to read it ahead."""
    kinds = 3 + len(gradients)
    engine = make_engine(2, "nvme", tmp_path, accumulation=2, sub_group_size=8, **gradients, **pipeline)
    files = engine.zero_engine._files
    assert files is not None
    most = 4096 * kinds * (3 - list(pipeline.values()).count(False))
    for step in range(3):
        train(engine, step, 1)
        engine.optimizer_statistics()
        assert files._memory.peak_bytes <= most
    assert files._memory.peak_bytes == most or "offload_pipeline_read" in pipeline
    engine.close()


def test_a_skipped_update_frees_the_buffers_that_it_would_have_used(tmp_path: Path) -> None:
    made, _ = OPTIMIZERS["AdamW"]
    precision = {**FP16, "initial_loss_scale": 2.0**20}
    engine = make_engine(2, "nvme", tmp_path, optimizer=made, precision=precision, sub_group_size=2, **GRADIENTS)
    files = engine.zero_engine._files
    assert files is not None
    for step in range(6):
        train(engine, step, 1)
        assert files._memory.peak_bytes <= 4096 * 12
    assert 0 < engine.skipped_steps < 6
    engine.close()


def gradients_through_every_door(engine: DataParallelEngine) -> Iterator[list[tuple[str, Tensor | None]]]:
    """Read and write gradients in every way that users have, in steps of two passes; yield what was read."""
    named = list(engine.module.named_parameters())
    dtype = named[0][1].dtype
    for step in range(4):
        for micro in range(2):
            x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(2 * step + micro)).to(dtype)
            engine.backward(engine(x).float().square().mean())
            yield [(name, safe_get_full_grad(parameter)) for name, parameter in named]
            if micro == 0:
                engine.step()
        first, second, *_, last = (parameter for _, parameter in named)
        gradient = safe_get_full_grad(first)
        assert gradient is not None
        safe_set_full_grad(first, gradient * 2 + 0.5)
        found = safe_get_full_grad(first)
        assert found is not None and torch.equal(found, (gradient * 2 + 0.5).to(dtype).to(found.dtype))
        if step == 1:
            assert last.grad is not None
            last.grad.zero_()
        if step == 2:
            second.grad = None
        yield [(name, safe_get_local_grad(parameter)) for name, parameter in named]
        statistics = engine.optimizer_statistics()
        assert step != 1 or statistics["num_zeros"] > 0
        yield [(name, torch.tensor(value)) for name, value in statistics.items() if name == "num_zeros"]
        engine.step()
        yield [(name, safe_get_full_fp32_param(parameter)) for name, parameter in named]
        yield [(name, safe_get_full_grad(parameter)) for name, parameter in named]  # until the next step begins


# Every pair of a stage, a precision and a number of buffers.
@each(
    ("buffers", "stage", "precision"),
    [(4 * ((stage + number) % 2), stage, p) for stage in (1, 2, 3) for number, p in enumerate(PRECISIONS)],
)
def test_gradients_are_those_of_an_engine_on_the_device(
    buffers: int, stage: int, precision: Mapping[str, Any], tmp_path: Path
) -> None:
    in_files = {**GRADIENTS, "offload_buffer_count": buffers}
    files, plain = (
        make_engine(stage, home, tmp_path, precision=precision, accumulation=2, **zero)
        for home, zero in (("nvme", in_files), ("none", {}))
    )
    assert files.zero_engine.model_state_bytes(Home.FILE).gradients > 0
    assert files.zero_engine.model_state_bytes(Home.HOST).gradients == 0
    for ours, theirs in zip(gradients_through_every_door(files), gradients_through_every_door(plain), strict=True):
        assert [name for name, _ in ours] == [name for name, _ in theirs]
        for (name, one), (_, other) in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None), name
            assert one is None or other is None or torch.equal(one, other), name
    files.close()


def test_many_parameters_are_read_at_once(tmp_path: Path) -> None:
    """A user may hold all states, which is more than there are buffers."""
    files, plain = (make_engine(2, home, tmp_path) for home in ("nvme", "none"))
    kept = []
    for engine in (files, plain):
        train(engine, 0, 2)
        kept.append([safe_get_full_fp32_param(parameter) for parameter in engine.module.parameters()])
        train(engine, 2, 2)
        kept[-1] += [safe_get_full_optimizer_state(p, "exp_avg") for p in engine.module.parameters()]
    for one, other in zip(*kept, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)
    files.close()


def peak_of_a_small_pool(rank: int, folder: Path) -> int:
    mesh = mesh_in_worker(rank, dp=2)
    zero = {**GRADIENTS, "offload_buffer_count": 4, "sub_group_size": 2}
    engine = make_engine(2, "nvme", folder, accumulation=3, mesh=mesh, **zero)
    train(engine, 0, 6)
    files = engine.zero_engine._files
    assert files is not None
    engine.close()
    return files._memory.peak_bytes


@pytest.mark.gloo
def test_reductions_beside_backward_take_no_other_buffers(tmp_path: Path) -> None:
    assert all(peak <= 4 * 4096 for peak in run_ranks(2, peak_of_a_small_pool, tmp_path))


# --- checkpoints ------------------------------------------------------------------------------------------------------


@each(("stage", "optimizer"), [(1, "AdamW of the configuration"), (2, "SGD"), (3, "AdamW of the configuration")])
def test_a_checkpoint_does_not_depend_on_the_home(stage: int, optimizer: str, tmp_path: Path) -> None:
    made, _ = OPTIMIZERS[optimizer]
    expected: list[tuple[str, Tensor]] = []
    for saving in HOMES:
        with ExitStack() as stack:
            saved = make_engine(stage, saving, tmp_path, optimizer=made)
            stack.callback(saved.close)
            train(saved, 0, 3)
            saved.save_checkpoint(tmp_path / f"{stage} {saving}")
            train(saved, 3, 3)
            expected = expected or figures(saved)
            assert same(figures(saved), expected)
            for loading in HOMES:
                loaded = make_engine(stage, loading, tmp_path, optimizer=made)
                stack.callback(loaded.close)
                train(loaded, 20, 1)  # so that there are other states to take the place of
                loaded.load_checkpoint(tmp_path / f"{stage} {saving}")
                train(loaded, 3, 3)
                assert same(figures(loaded), expected), (saving, loading)


def homes_on_ranks(rank: int, stage: int, folder: Path) -> list[list[tuple[str, Tensor]]]:
    """Return the figures of a training that goes on from its own checkpoint, and from those of other homes."""
    found = []
    for saving, loading in (("none", "none"), ("none", "nvme"), ("nvme", "cpu"), ("cpu", "nvme"), ("nvme", "none")):
        saved = make_engine(stage, saving, folder, mesh=mesh_in_worker(rank, dp=2))
        train(saved, 0, 2)
        saved.save_checkpoint(folder / f"{stage} {saving} {loading}")
        saved.close()
        loaded = make_engine(stage, loading, folder, mesh=mesh_in_worker(rank, dp=2))
        loaded.load_checkpoint(folder / f"{stage} {saving} {loading}")
        train(loaded, 2, 2)
        found.append(figures(loaded))
        loaded.close()
    return found


@pytest.mark.gloo
def test_a_checkpoint_does_not_depend_on_the_home_of_several_ranks(tmp_path: Path) -> None:
    for plain, *others in run_ranks(2, homes_on_ranks, 3, tmp_path):
        for found in others:
            assert same(found, plain)


# --- what the process has ---------------------------------------------------------------------------------------------

LIMITED = """
import json, re, resource, sys
from pathlib import Path
import torch
from torch import nn
import megazero

home, folder, allowed, settings = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
torch.manual_seed(3)
model = nn.Sequential(*(nn.Linear(1024, 1024, dtype=torch.bfloat16) for _ in range(16)))
zero = {"zero_stage": 2, "offload_optimizer": home, "reduce_bucket_size": 1 << 20}
if home == "nvme":
    zero |= {"nvme_path": folder, "sub_group_size": 1 << 18, "aio_queue_depth": 1, **settings}
optimizer = {"type": "AdamW", "lr": 0.001}
config = {"zero": zero, "precision": {"precision": "bf16"}, "optimizer": optimizer}
small = megazero.initialize(nn.Linear(8, 8, dtype=torch.bfloat16), config)  # so that all modules are imported
small.backward(small(torch.ones(1, 8).bfloat16()).float().sum())
small.step()
small.close()
if allowed:
    present = int(re.search(r"VmData:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (present + allowed, resource.RLIM_INFINITY))
engine = megazero.initialize(model, config)
for step in range(3):
    x = torch.randn(8, 1024, generator=torch.Generator().manual_seed(step)).bfloat16()
    loss = (engine(x).float() - 1).square().mean()
    engine.backward(loss)
    engine.step()
    print(loss.item().hex(), flush=True)
"""
NUMEL = 16 * (1024 * 1024 + 1024)
# Parameters and gradients take 4 bytes an element, and states 12; the rate of copies is measured with 6 for a moment.
ALLOWED = 15 * NUMEL
# Too little with gradients in memory, which need 9 at most; with gradients in files 7 are enough.
LESS_ALLOWED = NUMEL * 31 // 4


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the limit is set from what Linux counts")
def test_states_in_files_need_no_memory_of_the_process(tmp_path: Path) -> None:
    """The process may have less memory than parameters, gradients and states take together."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.Popen(
            [warm_python(), "-c", LIMITED, home, str(tmp_path), str(allowed), json.dumps(dict(settings))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for home, allowed, settings in (
            ("none", 0, {}),
            ("cpu", ALLOWED, {}),
            ("nvme", LESS_ALLOWED, {}),
            ("nvme", ALLOWED, {}),
            ("nvme", LESS_ALLOWED, GRADIENTS),
        )
    ]
    (free, free_error), *others = (run.communicate(timeout=100) for run in runs)
    plain, *ends = (run.returncode for run in runs)
    assert plain == 0 and len(free.split()) == 3, free_error
    for end, (_, error) in zip(ends[:2], others[:2], strict=True):
        assert end == 1 and ("can't allocate memory" in error or "MemoryError" in error), error
    refusal = others[0][1][others[0][1].index("MemoryLimitError") :]
    assert re.search(r": \d+ bytes \(\d+\.\d [KM]iB\) of host memory for what is offloaded\n", refusal), refusal
    assert "rule:  the system has that much left" in refusal and "or device nvme" in refusal
    for end, (losses, error) in zip(ends[2:], others[2:], strict=True):
        assert end == 0 and losses == free, error
    assert os.listdir(tmp_path) == []


KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_files

folder = Path(sys.argv[2])
engine = test_files.make_engine(3, "nvme", folder)
test_files.train(engine, 0, 3)
engine.save_checkpoint(folder / "saved")
test_files.train(engine, 3, 1)
states, blocks = engine.zero_engine._files, []
def die_in_the_third_write(way, nbytes):
    blocks.append(way)
    if blocks.count("write") == 3:
        os.kill(os.getpid(), 9)
states._record = die_in_the_third_write
test_files.train(engine, 4, 1)
"""


def test_a_kill_in_an_update_leaves_nothing_and_the_checkpoint_goes_on(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    words = [warm_python(), "-c", KILLED, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == -9, done.stderr
    assert os.listdir(tmp_path / "states") == []
    plain = make_engine(3, "none", tmp_path)
    losses = train(plain, 0, 6)
    resumed = make_engine(3, "nvme", tmp_path)
    resumed.load_checkpoint(tmp_path / "saved")
    assert train(resumed, 3, 3) == losses[3:]
    assert same(figures(resumed), figures(plain))
    resumed.close()
