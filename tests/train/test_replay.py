"""A run that meets a value that is not finite names it, changes nothing by it, and saves the state before it.

Faults are planted by hooks on one rank: they multiply a module's output, or a parameter's gradient, by NaN in one
micro-batch of every step from the third on, so also when the step is computed again.
"""

import contextlib
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.checkpoints import assert_equal_states
from support.processes import run_ranks
from support.small_runs import CPU, tiny_run, train_run
from support.training import Saved, assemble, boxes
from torch import Tensor, nn

from megazero.checkpoint.folders import list_steps
from megazero.checkpoint.reader import open_checkpoint
from megazero.errors import TrainingError
from megazero.parallel.launch import Launch
from megazero.signals import StopRequest
from megazero.train.build import assemble as assemble_run
from megazero.train.build import check_checkpoint
from megazero.train.loop import _Loop, train
from megazero.train.start.check import check

KINDS = ("weight", "exp_avg", "exp_avg_sq")
ACCUMULATION = 3
GOOD_STEPS = 2


@dataclass
class Planted:
    """A hook's function: NaN in one micro-batch of every step but the good ones, else the tensor itself."""

    micro_batch: int
    calls: int = 0

    def spoil(self, tensor: Tensor) -> Tensor:
        step, micro_batch = divmod(self.calls, ACCUMULATION)
        self.calls += 1
        return tensor * torch.nan if step >= GOOD_STEPS and micro_batch == self.micro_batch else tensor


@dataclass(frozen=True)
class Fault:
    """A fault on one rank.  path: of a parameter, whose gradient is spoilt, or of a module, whose output is."""

    rank: int
    path: str
    micro_batch: int = 1

    def plant(self, model: nn.Module) -> None:
        planted = Planted(self.micro_batch)
        if self.path in dict(model.named_parameters()):
            model.get_parameter(self.path).register_hook(planted.spoil)
        else:
            model.get_submodule(self.path).register_forward_hook(lambda _m, _i, output: planted.spoil(output))


class Ended(NamedTuple):
    """The message that one rank's run ended with, and the state that the rank owned then."""

    message: str
    saved: list[Saved]


def run_with_fault(rank: int, size: int, settings: dict[str, Any], fault: Fault) -> Ended:
    config, launch = tiny_run(**settings), Launch(rank, size, rank)
    with contextlib.redirect_stdout(io.StringIO()):
        checked = check(config, launch)
        check_checkpoint(config, checked, size)
        run = assemble_run(config, launch, CPU, checked)
        if rank == fault.rank:
            fault.plant(run.context.engine.model)
        with pytest.raises(TrainingError) as caught:
            train(run)
    assert caught.value.exit_code == 3
    saved = [box for fragment in run.context.engine.owned_state() for box in boxes(fragment)]
    return Ended(str(caught.value), saved)


@dataclass(frozen=True)
class Case:
    """A layout, the fault that is planted, and the words that must name it."""

    fault: Fault
    words: str
    tp: int = 1
    pp: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    size: int = 2

    def run_settings(self, folder: Path) -> dict[str, Any]:
        data_ranks = self.size // (self.tp * self.pp)
        return {
            "micro_batch_size": 2,
            "global_batch_size": 2 * ACCUMULATION * data_ranks,
            "train_iters": 5,
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "precision": "fp32",
            "save": str(folder / "save"),
            "save_interval": 1,
            **self.settings,
        }


UP = "layers.1.mlp.up"
FP8 = {"precision": "bf16", "fp8_format": "hybrid", "hidden_size": 32, "seq_length": 8}  # dims that 16 divides
FP16 = {"precision": "fp16", "loss_scale": 1.0, "max_skipped_steps_at_min_loss_scale": 1}
CASES = [
    *(
        Case(
            Fault(1, f"{UP}.weight"),
            # Steps of 12 samples; micro-batch 1 of data-parallel rank 1 in step 3 has samples 24 + (2 + 1) * 2 on.
            f"the gradient of {UP}.weight, in layers.1, on rank 1 (dp 1), micro-batch 1 (samples 30 to 31)",
            settings={"zero_stage": stage},
        )
        for stage in range(4)
    ),
    Case(
        Fault(0, "layers.0.attention", 2),
        "the output of layers.0.attention, in layers.0, on rank 0 (dp 0), micro-batch 2 (samples 32 to 33)",
        settings={"zero_stage": 3, "precision": "bf16", "recompute_granularity": "selective"},
    ),
    Case(
        Fault(1, f"{UP}.weight", 0),
        f"the gradient of {UP}.weight, in layers.1, on rank 1 (tp 1), micro-batch 0 (samples 12 to 13)",
        tp=2,
        settings={"sequence_parallel": True, "recompute_granularity": "full"},
    ),
    Case(
        Fault(1, "layers.1"),
        "the output of layers.1, in layers.1, on rank 1 (pp 1), micro-batch 1 (samples 14 to 15)",
        pp=2,
        settings={"precision": "bf16"},
    ),
    Case(
        Fault(1, "final_norm.bias"),
        "the gradient of final_norm.bias, in final_norm, on rank 1 (pp 1), micro-batch 1 (samples 14 to 15)",
        pp=2,
        settings={"pipeline_schedule": "zero-bubble"},
    ),
    Case(
        Fault(0, "embedding.position.weight", 2),
        "the gradient of embedding.position.weight, in embedding.position, on rank 0 (dp 0), micro-batch 2",
        settings={**FP16, "zero_stage": 1},
    ),
    Case(
        Fault(1, f"{UP}.weight", 0),
        f"the gradient of {UP}.weight, in layers.1, on rank 1 (dp 1), micro-batch 0 (samples 26 to 27)",
        settings={**FP8, "zero_stage": 2, "fp8_recipe": "delayed", "fp8_cache_weights": True},
    ),
    Case(
        Fault(0, "layers.0.attention.qkv", 2),
        "the output of layers.0.attention.qkv, in layers.0, on rank 0 (dp 0), micro-batch 2 (samples 32 to 33)",
        settings={**FP8, "zero_stage": 3},
    ),
    Case(
        Fault(2, "layers.0.mlp"),
        "the output of layers.0.mlp, in layers.0, on rank 2 (pp 0, dp 1), micro-batch 1 (samples 30 to 31)",
        pp=2,
        size=4,
        settings={"zero_stage": 2, "rank_order": "dp-pp-tp"},
    ),
]


@pytest.mark.gloo
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fault_is_named_and_changes_nothing(case: Case, tmp_path: Path) -> None:
    ended = run_ranks(case.size, run_with_fault, case.size, case.run_settings(tmp_path), case.fault)
    for message, _ in ended:
        assert f"the first value that is not finite is {case.words}" in message.replace("\n", " ")
    kept = list_steps(tmp_path / "save")[GOOD_STEPS - 1]
    checkpoint = open_checkpoint(tmp_path / "save" / f"step_{kept.step:07}")
    for kind in KINDS:
        for name, value in assemble(box for one in ended for box in one.saved if box.kind == kind).items():
            assert torch.equal(value, checkpoint.read_full(name, kind)), (name, kind)


def test_the_state_before_is_saved_and_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    settings = {"train_iters": 5, "micro_batch_size": 2, "global_batch_size": 2 * ACCUMULATION, "precision": "fp32"}
    train_run(0, 1, {**settings, "save": str(tmp_path / "straight")})
    bad = {**settings, "save": str(tmp_path / "bad")}
    ended = run_with_fault(0, 1, bad, Fault(0, UP))
    assert f"--load {tmp_path / 'bad'} goes on after iteration 2" in ended.message
    assert [entry.step for entry in list_steps(tmp_path / "bad")] == [2]
    train_run(0, 1, {**bad, "load": str(tmp_path / "bad")})
    one, other = (open_checkpoint(tmp_path / name) for name in ("straight", "bad"))
    assert one.progress["consumed_samples"] == other.progress["consumed_samples"] == 5 * 2 * ACCUMULATION
    assert_equal_states(one, other)


def test_a_step_that_was_begun_before_the_figures_were_read_changes_nothing(tmp_path: Path) -> None:
    """On a GPU the figures of a step are read when the next one has been launched; here a CPU does the same."""
    settings = {"train_iters": 5, "micro_batch_size": 2, "precision": "fp32"}
    train_run(0, 1, {**settings, "save": str(tmp_path / "straight"), "exit_interval": 2})
    config, launch = tiny_run(**settings, save=str(tmp_path / "late")), Launch(0, 1, 0)
    with contextlib.redirect_stdout(io.StringIO()):
        run = assemble_run(config, launch, CPU, check(config, launch))
        Once(GOOD_STEPS).plant(run.context.engine.model)
        with StopRequest() as stop, pytest.raises(TrainingError, match=r"(?s)iteration 3: .* after iteration 2"):
            loop = _Loop(run, stop)
            loop._max_pending = 1
            loop.run_to_end()
    assert [entry.step for entry in list_steps(tmp_path / "late")] == [2]
    one, other = (open_checkpoint(tmp_path / name) for name in ("straight", "late"))
    assert {**one.progress, "run": None} == {**other.progress, "run": None}
    assert_equal_states(one, other)


@dataclass
class Once:
    """A fault in one step only: the one behind it is good."""

    step: int
    calls: int = 0

    def plant(self, model: nn.Module) -> None:
        model.get_parameter("final_norm.weight").register_hook(self._spoil)

    def _spoil(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient * torch.nan if self.calls == 1 + self.step else gradient


def spoil_a_weight(rank: int, settings: dict[str, Any]) -> str:
    """Make a run whose weight is damaged before the first step, and return the message it ends with."""
    config, launch = tiny_run(**settings), Launch(rank, 1, rank)
    with contextlib.redirect_stdout(io.StringIO()):
        run = assemble_run(config, launch, CPU, check(config, launch))
        with torch.no_grad():
            run.context.engine.model.get_parameter(f"{UP}.bias")[3] = torch.inf
        with pytest.raises(TrainingError) as caught:
            train(run)
    return str(caught.value)


def test_a_weight_that_is_not_finite_is_named_and_not_saved(tmp_path: Path) -> None:
    message = spoil_a_weight(0, {"save": str(tmp_path), "precision": "fp32"})
    assert f"is the parameter {UP}.bias itself, in layers.1, on rank 0, micro-batch 0 (samples 0 to 1)" in message
    assert "the weights were not finite before this step, and are not saved" in message
    assert list_steps(tmp_path) == []


def test_a_fault_that_does_not_come_again_is_told_apart(tmp_path: Path) -> None:
    config, launch = tiny_run(precision="fp32", save=str(tmp_path)), Launch(0, 1, 0)
    with contextlib.redirect_stdout(io.StringIO()):
        run = assemble_run(config, launch, CPU, check(config, launch))
        Once(GOOD_STEPS).plant(run.context.engine.model)
        with pytest.raises(TrainingError, match="computed again, every value is finite") as caught:
            train(run)
    assert "the first such gradient is final_norm.weight's" in str(caught.value)
    assert [entry.step for entry in list_steps(tmp_path)] == [GOOD_STEPS]


def test_without_the_check_a_run_goes_on(tmp_path: Path) -> None:
    told = train_run(0, 1, {"precision": "fp32", "lr": 1e30, "check_for_nan_in_loss_and_grad": False})
    assert told.reason == "finished 5 iterations"
