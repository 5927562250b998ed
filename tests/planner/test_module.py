"""Tests of plans of a user's own module: what a dry rank takes is what `megazero.initialize` takes, to the byte."""

import gc
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.each import each
from support.pages import block_with
from support.planned_module import ROWS, Tied, differences
from support.processes import run_ranks
from torch import Tensor, nn

import megazero
from megazero.comm.metered import sent_bytes
from megazero.errors import ConfigError, UsageError, UserError

PEAK = Path("/proc/self/clear_refs")  # Linux sets the peak back when 5 is written there
ADAM: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "gradient_clipping": 1.0}


def _zero(stage: int, **others: Any) -> dict[str, Any]:
    partitioned = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 700, **partitioned, **others}}


FILES = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
# {layout: (processes, module, configuration, made in parts)}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any], bool]] = {
    "stage 0, one process": (1, "tied", {**_zero(0), "gradient_accumulation_steps": 2}, False),
    "stage 0, three": (3, "awkward", _zero(0), False),
    "stage 1, two, bf16": (2, "tied", {**_zero(1), "bf16": {"enabled": True}}, False),
    "stage 1, four": (4, "awkward", {**_zero(1), "gradient_accumulation_steps": 3}, False),
    "stage 2, three, fp16": (3, "tied", {**_zero(2), "fp16": {"enabled": True}}, False),
    "stage 2, four, offloaded": (4, "tied", _zero(2, offload_optimizer={"device": "cpu"}), False),
    "stage 2, two, in files": (2, "tied", _zero(2, offload_optimizer=FILES), False),
    "stage 3, two, in files": (2, "awkward", _zero(3, offload_optimizer=FILES, offload_param=FILES), False),
    "stage 3, one": (1, "awkward", {**_zero(3), "gradient_accumulation_steps": 2}, True),
    "stage 3, two": (2, "tied", {**_zero(3), "bf16": {"enabled": True}, "gradient_accumulation_steps": 2}, True),
    "stage 3, three, whole at first": (3, "tied", _zero(3), False),
    "stage 3, four, offloaded": (4, "awkward", _zero(3, offload_param={"device": "cpu"}), True),
    "stage 3, four, own form": (4, "tied", {"zero": {"zero_stage": 3, "mics_shard_size": 2}}, True),
}


@pytest.mark.gloo
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dry_rank_takes_what_a_real_one_does(layout: str) -> None:
    world_size, kind, config, made_in_parts = LAYOUTS[layout]
    optimizer = {"optimizer": {"type": "AdamW", "lr": 1e-3}} if "zero" in config else ADAM
    found = run_ranks(world_size, differences, world_size, kind, {**config, **optimizer}, made_in_parts)
    assert found == [[]] * world_size


class _Choosing(nn.Linear):
    """A layer that computes the rows which it likes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x.sum(1) > 0])


@each(
    ("changes", "kind", "words"),
    [
        ({"model_fn": nn.Linear(3, 3)}, UsageError, ("model_fn of type Linear", "lambda: MyModel(...)")),
        ({"model_fn": lambda: 3}, UsageError, ("model of type int",)),
        ({"batch": None}, UsageError, ("batch=None",)),
        ({"world_size": 0}, ConfigError, ("world_size=0", "at least 1")),
        ({"world_size": True}, ConfigError, ("world_size=True",)),
        ({"hardware": "dgx-h10"}, ConfigError, ("dgx-h100",)),
        ({"config": {**ADAM, "zero_optimization": {"stage": 7}}}, ConfigError, ("stage",)),
        ({"config": {**ADAM, **_zero(1)}, "made_in_parts": True}, ConfigError, ("made_in_parts=True beside whole",)),
        ({"config": {"zero": {"zero_stage": 2, "mics_shard_size": 3}}}, ConfigError, ("mics_shard_size 3",)),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, UsageError, ("optimizer of type SGD",)),
        ({"model_fn": lambda: _Choosing(3, 3)}, UsageError, ("nonzero", "do not depend on values")),
        ({"loss_fn": lambda model, batch: 1}, UserError, ("returns a int", "loss.mean()")),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], kind: type[UserError], words: tuple[str, ...]) -> None:
    arguments: dict[str, Any] = {"model_fn": lambda: nn.Linear(3, 3), "config": {**ADAM, **_zero(2)}}
    arguments |= {"batch": torch.ones(2, 3), "world_size": 4, **changes}
    with pytest.raises(kind) as caught:
        megazero.plan(**arguments)
    assert [word for word in words if word not in str(caught.value)] == []


@each("stage", [0, 1, 2, 3])
def test_states_and_traffic_are_those_of_the_formulas(stage: int) -> None:
    """Of three matrices that all ranks divide; model states as the paper counts them, messages as a ring sends them."""
    ranks, width = 8, 64
    released = {"stage3_max_reuse_distance": 0} if stage == 3 else {}
    config = {**ADAM, **_zero(stage, reduce_bucket_size=10**6, **released), "bf16": {"enabled": True}}

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))

    found = megazero.plan(make, config, torch.ones(4, width), world_size=ranks)
    part = found.to_json()["ranks"][0]["parts"]["steady step"]
    numel = 3 * width * width
    shared = [ranks if stage >= least else 1 for least in (1, 3)]  # optimizer states, parameters
    assert part["peaks"]["master"] + part["peaks"]["moments"] == 12 * numel // shared[0]
    assert part["peaks"]["parameters"] == 2 * numel // shared[1]
    sent = {name: row["bytes"] for name, row in part["traffic"]["dp"].items()}
    # In stage 3 too: the last two are there still when backward begins, and no gradient goes beyond the first.
    once = sent_bytes("all_gather", 2 * numel, ranks)
    assert sent == {"all_gather": once, "reduce_scatter": once}


def test_a_plan_is_a_page_and_json() -> None:
    made: list[int] = []

    def batch() -> Tensor:
        made.append(1)
        return torch.zeros(ROWS, 11, dtype=torch.int64)

    config = {**ADAM, **_zero(2), "gradient_accumulation_steps": 3}
    found = megazero.plan(Tied, config, batch, world_size=24)
    assert len(made) == 2 * 3 + 1  # two steps of three micro-batches, and one whose rows are counted
    assert found.fits
    told = found.to_json()
    assert told["world_size"] == 24 and told["nodes"] == 3
    assert told["time"]["samples"] == 24 * 3 * ROWS
    assert told["time"]["step_seconds"][0] > 0
    steady = told["ranks"][0]["parts"]["steady step"]
    assert found.peak_bytes >= steady["peak_bytes"] == sum(steady["at_peak"].values())
    assert steady["peak_module"]
    page = str(found)
    for words in ("samples/s", "peak of rank 0", "dp reduce-scatter", "fits: "):
        assert words in page


@pytest.mark.skipif(not PEAK.is_file(), reason="the system does not tell a peak that can be set back")
def test_a_large_module_is_planned_in_little_memory() -> None:
    """Of 8.6 billion parameters, whose model states are 137 GB, on 64 ranks."""
    config = {**ADAM, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    gc.collect()
    PEAK.write_text("5")
    before = peak_kib()
    found = megazero.plan(
        lambda: nn.Sequential(*(nn.Linear(16384, 16384) for _ in range(32))),
        config,
        torch.ones(8, 16384, dtype=torch.bfloat16),
        world_size=64,
    )
    assert peak_kib() - before < 300 << 10
    rank = found.to_json()["ranks"][0]
    states = sum(rank["parts"]["steady step"]["peaks"][kind] for kind in ("parameters", "master", "moments"))
    numel = rank["parameters"]
    assert numel == 32 * (16384 + 1) * 16384
    assert 0 <= states - 14 * numel // 64 < states / 500  # some buckets are filled up
    assert rank["parts"]["start-up"]["peak_bytes"] < 2 * states  # a module that is whole at first would have 32 GiB


def peak_kib() -> int:
    """Return the most memory that this process had since its peak was set back."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])


def test_the_command_of_the_page_plans_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    code = block_with("docs/planning.md", "plan_module.py").text.split("<<'PY'\n")[1].split("PY\n")[0]
    for given, smaller in (("Model(8192, 32)", "Model(256, 2)"), ("2048", "64"), ("50257", "61")):
        assert given in code
        code = code.replace(given, smaller)
    exec(compile(code, "plan_module.py", "exec"), {"__name__": "__main__"})
    assert "fits: " in capsys.readouterr().out
