"""Sound layouts on real ranks agree with one process, and a fault planted in any dimension is named."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import make_run
from support.families import FAMILIES
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor

from megazero.comm.interface import CompletedWork
from megazero.comm.mesh import Mesh
from megazero.comm.startup import make_mesh
from megazero.config.run import RunConfig
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.topology import Topology
from megazero.train.start.inputs import open_inputs
from megazero.verify.side_by_side import difference, verify
from megazero.verify.verdict import BOUND, CopyDifference, Report, TensorDifference

# Settings that a user may have chosen: another precision, dropout, clipping that takes effect, warm-up.
MODEL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 12,
    "num_attention_heads": 4,
    "seq_length": 6,
    "vocab_size": 29,
    "make_vocab_size_divisible_by": 1,
    "init_method_std": 0.2,
    "global_batch_size": 8,
    "clip_grad": 0.5,
    "lr": 1e-2,
    "lr_warmup_iters": 2,
    "precision": "bf16",
}
FULL = {"recompute_granularity": "full"}
NUM_PARAMETERS = 4 * 12 + 4


@dataclass(frozen=True)
class Layout:
    """A layout to verify: the degrees of tp, dp and pp, the samples of a micro-batch, and further settings."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    micro: int = 2
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.tp * self.dp * self.pp

    def config(self) -> RunConfig:
        layout = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "micro_batch_size": self.micro,
        }
        return make_run(**{**MODEL, **layout, **self.settings})

    def __str__(self) -> str:
        return f"tp{self.tp} dp{self.dp} pp{self.pp} {self.settings}"


class Tampered:
    """A wrapper that passes everything on, except that `change` does some calls of one method, counted from 1."""

    def __init__(self, inner: Any, method: str, calls: Callable[[int], bool], change: Callable[..., Any]) -> None:
        self._inner, self._method, self._calls, self._change = inner, method, calls, change
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return self._call if name == self._method else getattr(self._inner, name)

    def _call(self, *arguments: Any, **options: Any) -> Any:
        if arguments[1:] in (("max",), ("min",)):
            return self._inner.all_reduce(*arguments)
        self._count += 1
        method = partial(getattr(self._inner, self._method), **options)
        return self._change(method, *arguments) if self._calls(self._count) else method(*arguments)


def left_out(method: Callable[..., Any], *arguments: Any) -> Any:
    return CompletedWork()


def doubled(method: Callable[..., Any], tensor: Tensor) -> Any:
    method(tensor).wait()
    tensor *= 2
    return CompletedWork()


def given_twice(method: Callable[..., Any], output: Tensor, input: Tensor) -> Any:
    input *= 2
    return method(output, input)


def one_element_wrong(method: Callable[..., Any], output: Tensor, input: Tensor) -> Any:
    input[0] *= 1.001
    return method(output, input)


def one_element_received_wrong(method: Callable[..., Any], output: Tensor, *arguments: Any) -> Any:
    method(output, *arguments).wait()
    output[0] += 1e-3  # the other rank has sent this element
    return CompletedWork()


def altered(method: Callable[..., Any], tensor: Tensor, to: int) -> Any:
    changed = tensor.clone()
    changed[0] *= 1.001
    return method(changed, to)


@dataclass(frozen=True)
class Fault:
    """A fault on a communicator: the method, the change, at which of its calls, and on which ranks (by default all)."""

    key: str
    method: str
    change: Callable[..., Any]
    first: int = 1
    every: int = 0  # 0: only the first call
    ranks: tuple[int, ...] = (0, 1, 2, 3)

    def plant(self, mesh: Mesh) -> Mesh:
        """Return the mesh, with the fault if it concerns this rank."""
        if mesh.rank not in self.ranks:
            return mesh
        wrong = Tampered(mesh.communicators[self.key], self.method, self._is_due, self.change)
        return replace(mesh, communicators={**mesh.communicators, self.key: wrong})

    def _is_due(self, call: int) -> bool:
        late = call - self.first
        return late >= 0 and late % self.every == 0 if self.every else late == 0


def verify_on_rank(rank: int, layout: Layout, fault: Fault | None, steps: int) -> Report:
    mesh = mesh_in_worker(rank, tp=layout.tp, dp=layout.dp, pp=layout.pp)
    config = layout.config()
    inputs = open_inputs(config.data, config.model, seed=config.training.seed, evaluates=False)
    return verify(config, fault.plant(mesh) if fault else mesh, FusedBuffers(0, mesh.device), inputs, steps=steps)


def verified(layout: Layout, fault: Fault | None = None, steps: int = 2) -> Report:
    """Verify the layout on real ranks; return their report, which must be the same on all."""
    reports = run_ranks(layout.world_size, verify_on_rank, layout, fault, steps)
    assert all(report == reports[0] for report in reports)
    return reports[0]


@pytest.mark.gloo
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, settings={"zero_stage": 0}),
        Layout(dp=2, micro=1, settings={"zero_stage": 2, "gradient_predivide_factor": 3.0}),
        Layout(tp=2, pp=2, settings={"sequence_parallel": True, "zero_stage": 1}),
        Layout(
            dp=2,
            pp=2,
            micro=1,
            settings={"num_layers_per_virtual_pipeline_stage": 1, "zero_stage": 3, "param_persistence_threshold": 20},
        ),
        Layout(tp=2, dp=2, settings={**FULL, "partition_activations": True, "zero_stage": 3}),
        Layout(dp=2, settings={**FULL, "zero_stage": 0, "untie_embeddings_and_output_weights": True}),
        Layout(pp=2, settings={"pipeline_schedule": "zero-bubble", "zero_stage": 1}),
    ],
    ids=str,
)
def test_sound_layouts_agree(layout: Layout) -> None:
    steps = 3 if layout.settings["zero_stage"] == 3 else 2  # the third gathers after the order of a whole step
    report = verified(layout, steps=steps)
    assert report.agrees, "\n".join(report.lines())
    assert [step.step for step in report.steps] == list(range(1, steps + 1))
    num_parameters = NUM_PARAMETERS + ("untie_embeddings_and_output_weights" in layout.settings)
    assert {len(step.gradients) for step in report.steps} == {len(report.weights)} == {num_parameters}
    assert len(report.parameters) == num_parameters
    # The differences are as small as float64 rounding makes them, far below the bounds.
    assert max(found.relative for step in report.steps for found in step.gradients) < BOUND / 1e3
    assert report.steps[0].norm.one > 0.5, "clipping is meant to be active"
    shared = [parameter.name for parameter in report.parameters if len(parameter.stages) == 2]
    assert shared == (["embedding.word.weight"] if layout.pp > 1 else [])
    assert report.num_copies > 0 or layout == Layout(pp=2)


IN_HOST: dict[str, Any] = {"offload_optimizer": "cpu", "offload_param": "cpu", "zero_stage": 3}
ADAFACTOR: dict[str, Any] = {"optimizer": "adafactor", "num_query_groups": 2}
IN_FILES: dict[str, Any] = {"offload_optimizer": "nvme", "sub_group_size": 300}


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama3", Layout(tp=2, dp=2, settings={**IN_HOST, "sequence_parallel": True})),
        ("qwen3", Layout(tp=2, pp=2, settings={"zero_stage": 1})),
        ("bloom", Layout(dp=2, pp=2, micro=1, settings={**IN_FILES, "zero_stage": 2})),
        ("falcon", Layout(tp=4, settings={**IN_FILES, "offload_gradients_nvme": True, "optimizer": "lamb"})),
        ("nope", Layout(dp=2, settings={**ADAFACTOR, "offload_param": "nvme", "zero_stage": 3})),
    ],
)
def test_families_agree_with_their_states_in_any_home(family: str, layout: Layout, tmp_path: Path) -> None:
    files = {"nvme_path": str(tmp_path)} if "nvme" in layout.settings.values() else {}
    report = verified(replace(layout, settings={"zero_stage": 1, **FAMILIES[family], **layout.settings, **files}))
    assert report.agrees, "\n".join(report.lines())
    assert max(found.relative for step in report.steps for found in step.gradients) < BOUND / 1e3
    assert report.steps[0].norm.one > 0.1, "there are gradients"


# The model is cut at a given place so that the tests can name the stage of each layer.
HALVES = {"pipeline_split": "2,2"}
SEQUENCE = {"sequence_parallel": True}
ONE_BATCH = 8  # samples of a micro-batch that is a whole step


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("layout", "fault", "first", "hint"),
    [
        pytest.param(
            Layout(tp=2, micro=ONE_BATCH),
            Fault("tp", "all_reduce", left_out, first=4),
            "step 1, gradient of embedding.word.weight",
            "the loss differs too, so it is the forward pass: the sums over the tensor axis",
            id="tp: a sum of forward is left out",
        ),
        pytest.param(
            Layout(tp=2, micro=ONE_BATCH),
            Fault("tp", "all_reduce", doubled, first=14),
            "step 1, gradient of embedding.word.weight",
            "everything up to layers.2.post_attention_norm.bias differs and nothing behind it: the gradients that",
            id="tp: a sum of backward is doubled",
        ),
        pytest.param(
            Layout(tp=2, micro=ONE_BATCH, settings=SEQUENCE),
            Fault("tp", "all_reduce", left_out, first=2, every=2),
            "step 1, gradient of embedding.position.weight",
            "only parameters that every tensor-parallel rank holds whole differ: their sum over the tensor axis",
            id="sequence parallel: gradients of norms are not summed",
        ),
        pytest.param(
            Layout(dp=2, settings={"zero_stage": 2}),
            Fault("dp", "reduce_scatter_into", one_element_wrong, first=3, ranks=(1,)),
            "step 1, gradient of layers.2.",
            "the reduction of the buckets that hold them, over the data-parallel axis",
            id="dp: one element of one reduction",
        ),
        pytest.param(
            Layout(dp=2, settings={"zero_stage": 1}),
            Fault("dp", "reduce_scatter_into", given_twice, every=1),
            "step 1, gradient of embedding.word.weight",
            "all gradients are 2 times as large: the data-parallel reduction, or its divisor",
            id="dp: the divisor",
        ),
        pytest.param(
            Layout(dp=2, settings={"zero_stage": 2}),
            Fault("dp_gather", "all_gather_into", one_element_received_wrong, first=3, ranks=(1,)),
            "step 2, ",
            "step 1 agrees: the update of weights at its end, or their exchange between ranks",
            id="dp: published parameters",
        ),
        pytest.param(
            Layout(pp=2, settings=HALVES),
            Fault("ends", "all_reduce", left_out, every=1),
            "step 1, gradient of embedding.word.weight",
            "only parameters shared by the first and the last pipeline stage differ: their sum over the two",
            id="ends: not summed",
        ),
        pytest.param(
            Layout(pp=2, settings=HALVES),
            Fault("pp", "send", altered, first=2, ranks=(0,)),
            "step 1, gradient of embedding.word.weight",
            "so it is the forward pass: the activations that one pipeline stage sends to the next",
            id="pp: an activation is altered",
        ),
        pytest.param(
            Layout(pp=2, settings=HALVES),
            Fault("pp_gradients", "send", altered, first=3, ranks=(1,)),
            "step 1, gradient of embedding.word.weight",
            "nothing behind it: the gradients that pipeline stage 1 sends to 0",
            id="pp: a gradient is altered",
        ),
    ],
)
def test_what_is_planted_is_named(layout: Layout, fault: Fault, first: str, hint: str) -> None:
    report = verified(layout, fault)
    assert not report.agrees
    assert report.first_difference().startswith(first), "\n".join(report.lines())
    assert any(hint in found for found in report.hints()), "\n".join(report.lines())


@pytest.mark.gloo
def test_only_what_is_wrong_is_named() -> None:
    """One wrong element is reported in one parameter only, as one element."""
    fault = Fault("dp", "reduce_scatter_into", one_element_wrong, first=3, ranks=(1,))
    report = verified(Layout(dp=2, settings={"zero_stage": 2}), fault, steps=1)
    (found,) = report.steps[0].differing
    assert (found.beyond, found.agrees) == (1, False)


@pytest.mark.gloo
def test_weights_that_go_wrong_at_the_end_are_named() -> None:
    fault = Fault("dp_gather", "all_gather_into", one_element_received_wrong, first=3, ranks=(1,))
    report = verified(Layout(dp=2, settings={"zero_stage": 1}), fault, steps=1)
    assert all(step.agrees for step in report.steps)
    assert report.first_difference().startswith("after step 1, weight of layers.0.")
    assert "data-parallel copies on ranks 0 and 1 are not the same" in report.first_difference()


@pytest.mark.gloo
def test_copies_that_drift_apart_are_named() -> None:
    """Only the first tensor-parallel rank's copy of a norm's gradient counts, so nothing else shows a wrong copy."""
    fault = Fault("dp", "reduce_scatter_into", one_element_wrong, first=3, ranks=(3,))
    report = verified(Layout(tp=2, dp=2, settings={"zero_stage": 1}), fault, steps=1)
    (step,) = report.steps
    assert (step.differing, step.loss.agrees, step.norm.agrees) == ((), True, True)
    name = "layers.2.input_norm.weight"
    assert step.copies == (CopyDifference("tp", "gradient", name, (0, 1)),)
    assert report.first_difference().startswith(f"step 1, gradient of {name}: the tensor-parallel copies on ranks")


def test_one_process_is_compared_with_itself() -> None:
    config = Layout(settings={**FULL, "checkpoint_in_cpu": True, "reduce_bucket_size": 100}).config()
    buffers = FusedBuffers(0, torch.device("cpu"))
    inputs = open_inputs(config.data, config.model, seed=config.training.seed, evaluates=False)
    mesh, told = make_mesh(Topology(), 0, torch.device("cpu"), buffers), []
    report = verify(config, mesh, buffers, inputs, steps=1, print_line=told.append)
    assert report.agrees and report.num_copies == 0
    assert [line for line in told if not line.startswith("step 1 of 1: ")] == []  # a slow machine prints progress


# --- how tensors are compared -----------------------------------------------------------------------------------------


def compared(found: list[float], expected: list[float], least: float = 0.0) -> TensorDifference:
    here, one = (torch.tensor(values, dtype=torch.float64) for values in (found, expected))
    return difference("x", here, one, least=least)


def test_a_difference_is_measured_by_the_largest_element() -> None:
    found = compared([1.0, 4e-9], [1.0, 0.0], least=0.5)
    assert (found.scale, found.beyond, found.numel, found.agrees) == (1.0, 1, 2, False)
    assert found.relative == pytest.approx(4e-9)
    assert compared([1e-12], [0.0], least=1e-2).agrees
    assert not compared([1e-12], [0.0]).agrees
    assert compared([0.0], [0.0]).agrees


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_never_agrees(bad: float) -> None:
    for found, expected in (([bad, 1.0], [1.0, 1.0]), ([1.0, 1.0], [bad, 1.0]), ([bad, 1.0], [bad, 1.0])):
        assert not compared(found, expected).agrees


def test_a_factor_is_found_where_there_is_one() -> None:
    assert compared([2.0, -6.0], [1.0, -3.0]).factor == pytest.approx(2.0)
    assert compared([2e-300, -6e-300], [1e-300, -3e-300]).factor == pytest.approx(2.0)
    assert compared([2.0, -6.0], [1.0, 3.0]).factor is None
    assert compared([2.0], [0.0]).factor is None
