"""Layers that write their own gradients keep, in every ZeRO stage, those that autograd finds in the plain model.

All memory that gradients go through is full of nan before each step (`support/kept_gradients.py`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from support.kept_gradients import (
    MICRO_BATCH,
    Kept,
    assert_equal,
    first_weights,
    placed,
    plain_gradients,
    small_run,
    whole_gradients,
)
from support.processes import run_ranks
from support.reference import Weights
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.gloo

STAGES = (0, 1, 2, 3)
WEIGHTS = ("attention.qkv.weight", "attention.projection.weight", "mlp.up.weight", "mlp.down.weight")
TIED = "embedding.word.weight"
UP = "layers.0.mlp.up.weight"
EXACT = 1e-12


def step_on_rank(rank: int, dp: int, accumulation: int, settings: dict[str, Any], frozen: Sequence[str] = ()) -> Kept:
    """Take two steps and return the gradients kept in the second, in which nothing of the first may remain."""
    run = placed(rank, small_run(**settings), dp=dp, accumulation=accumulation, frozen=frozen)
    run.step()
    kept = run.step()
    run.engine.close()
    return kept


def gradients_of(dp: int, accumulation: int, frozen: Sequence[str] = (), **settings: Any) -> Weights:
    return whole_gradients(run_ranks(dp, step_on_rank, dp, accumulation, settings, frozen))


def expected(num_samples: int, **settings: Any) -> Weights:
    return plain_gradients(first_weights(small_run(**settings)), 0, num_samples)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("dp", "precision", "in_fp32", "tolerance"),
    [
        (1, "fp64", True, EXACT),
        (2, "fp64", True, EXACT),
        (2, "fp32", True, 3e-6),
        (2, "bf16", True, 0.04),
        (2, "bf16", False, 0.05),
    ],
)
def test_kept_gradients_are_those_of_plain_autograd(
    dp: int, precision: str, in_fp32: bool, tolerance: float, stage: int
) -> None:
    settings = {"precision": precision, "accumulate_allreduce_grads_in_fp32": in_fp32, "zero_stage": stage}
    accumulation, bucket = (1, 900) if (stage + dp + (precision == "fp32") + in_fp32) % 2 else (3, 10_000)
    found = gradients_of(dp, accumulation, reduce_bucket_size=bucket, **settings)
    assert_equal(found, expected(MICRO_BATCH * dp * accumulation, precision=precision), tolerance)


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_may_span_buckets_and_ends_may_be_untied(stage: int, untied: bool) -> None:
    settings = {"untie_embeddings_and_output_weights": untied}
    found = gradients_of(2, 2, reduce_bucket_size=100, zero_stage=stage, **settings)
    assert ("head.weight" in found) == untied
    assert_equal(found, expected(MICRO_BATCH * 4, **settings), EXACT)


@pytest.mark.parametrize(
    "settings", [{"overlap_comm": False}, {"contiguous_gradients": False}, {"communication_data_type": "fp64"}], ids=str
)
@pytest.mark.parametrize("stage", STAGES)
def test_other_ways_to_reduce(stage: int, settings: dict[str, Any]) -> None:
    """Gradients are the same if waited for at once, in autograd's own tensors, or sent in another number format."""
    precision = "fp32" if "communication_data_type" in settings else "fp64"
    found = gradients_of(2, 2, precision=precision, zero_stage=stage, **settings)
    assert_equal(found, expected(MICRO_BATCH * 4, precision=precision), 3e-6 if precision == "fp32" else EXACT)


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_weights_get_nothing(stage: int) -> None:
    for frozen in ((UP, "layers.1.attention.qkv.weight"), (TIED,)):
        found = gradients_of(2, 2, frozen, zero_stage=stage)
        wanted = {name: value for name, value in expected(MICRO_BATCH * 4).items() if name not in frozen}
        assert_equal(found, wanted, EXACT)


def penalised(rank: int, stage: int, accumulation: int, bucket: int) -> Kept:
    """Take steps with weights in the loss beside their layers: times fixed numbers and, below stage 3, squared."""
    run = placed(rank, small_run(zero_stage=stage, reduce_bucket_size=bucket), dp=2, accumulation=accumulation)
    terms: list[Tensor] = []
    for name in (UP, TIED):
        module = run.model.get_submodule(name.rpartition(".")[0])
        module.register_forward_hook(lambda module, *_: terms.append(term(module.weight, stage)), prepend=True)
    kept = {}
    for _ in range(2):
        kept = run.step(extra=lambda: terms.pop() + terms.pop())
    run.engine.close()
    return kept


def term(weight: Tensor, stage: int) -> Tensor:
    linear = (weight * torch.arange(weight.numel(), dtype=torch.float64).view_as(weight)).sum() * 1e-3
    return linear + 0.05 * weight.square().sum() if stage < 3 else linear


@pytest.mark.parametrize(("accumulation", "bucket"), [(1, 10_000), (3, 100)])
@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_used_beside_its_layer_gets_both_gradients(stage: int, accumulation: int, bucket: int) -> None:
    wanted = expected(MICRO_BATCH * 2 * accumulation)
    for name in (UP, TIED):
        weight = first_weights(small_run())[name].requires_grad_(True)
        (beside,) = torch.autograd.grad(term(weight, stage), weight)
        wanted[name] = wanted[name] + beside * 2 * accumulation  # it is a part of every rank's loss in each micro-batch
    found = whole_gradients(run_ranks(2, penalised, stage, accumulation, bucket))
    assert_equal(found, wanted, EXACT)


def hooked(rank: int, stage: int, name: str) -> tuple[list[Tensor], Kept, Kept]:
    """Return the gradients that a doubling hook on a weight gets, those then kept, and those kept without the hook."""
    run = placed(rank, small_run(zero_stage=stage, reduce_bucket_size=10_000), accumulation=2)
    seen: list[Tensor] = []
    handle = run.model.get_parameter(name).register_hook(
        lambda gradient: (seen.append(gradient.clone()), gradient * 2)[1]
    )
    doubled = run.step()
    handle.remove()
    kept = run.step()
    run.engine.close()
    return seen, doubled, kept


@pytest.mark.parametrize("name", [UP, TIED])
@pytest.mark.parametrize("stage", STAGES)
def test_a_hook_on_a_weight_sees_its_gradient_and_may_change_it(stage: int, name: str) -> None:
    [(seen, doubled, kept)] = run_ranks(1, hooked, stage, name)
    weights = first_weights(small_run())
    for micro, gradient in enumerate(seen):
        wanted = plain_gradients(weights, micro * MICRO_BATCH, MICRO_BATCH)[name] / 2
        torch.testing.assert_close(gradient.view(wanted.shape), wanted, rtol=1e-11, atol=1e-14)
    assert len(seen) == 2
    plain = expected(MICRO_BATCH * 2)
    assert_equal(whole_gradients([doubled]), {**plain, name: plain[name] * 2}, EXACT)
    assert_equal(whole_gradients([kept]), plain, EXACT)


def skipping(rank: int, stage: int, bucket: int, skipped: Sequence[int]) -> Kept:
    """Take a step of three micro-batches, some of which skip the second block."""
    run = placed(rank, small_run(zero_stage=stage, reduce_bucket_size=bucket), dp=2, accumulation=3)
    block = run.model.layers["1"]

    @contextmanager
    def without(micro: int) -> Iterator[None]:
        if micro in skipped:
            block.forward = lambda x, length: x
        yield
        block.__dict__.pop("forward", None)

    run.step()
    kept = run.step(around=without)
    run.engine.close()
    return kept


@pytest.mark.parametrize("skipped", [(0, 1, 2), (2,), (0,)], ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_that_is_not_used_has_no_gradient(stage: int, skipped: tuple[int, ...]) -> None:
    weights = first_weights(small_run())
    short = {name: value for name, value in weights.items() if not name.startswith("layers.1.")}
    wanted = {name: torch.zeros_like(value) for name, value in weights.items()}
    for micro in range(3):
        part = plain_gradients(short if micro in skipped else weights, micro * 2 * MICRO_BATCH, 2 * MICRO_BATCH)
        for name, gradient in part.items():
            wanted[name] += gradient / 3
    assert (wanted["layers.1.mlp.up.weight"].abs().sum() == 0) == (len(skipped) == 3)
    bucket = 100 if len(skipped) == 3 else 10_000
    assert_equal(whole_gradients(run_ranks(2, skipping, stage, bucket, skipped)), wanted, EXACT)


def asking_for_others(rank: int, stage: int) -> Kept:
    """Take a step in which torch.autograd.grad computes an input's gradient before each micro-batch's passes."""
    run = placed(rank, small_run(zero_stage=stage), dp=2, accumulation=2)

    @contextmanager
    def ask(micro: int) -> Iterator[None]:
        inputs: list[Tensor] = []

        def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            inputs.append(output)

        handle = run.model.get_submodule("layers.0.input_norm").register_forward_hook(keep)
        loss = run.loss(micro)
        handle.remove()
        (gradient,) = torch.autograd.grad(loss, inputs)
        assert gradient.abs().max() > 0
        yield

    kept = run.step(around=ask)
    run.engine.close()
    return kept


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_asked_for_outside_a_pass_adds_nothing(stage: int) -> None:
    """torch.autograd.grad runs the layers' backward without parameters as its targets, and adds to no gradient."""
    found = whole_gradients(run_ranks(2, asking_for_others, stage))
    assert_equal(found, expected(MICRO_BATCH * 2 * 2), EXACT)


def step_after_a_failure(rank: int, stage: int, contiguous: bool, failing: int) -> Kept:
    """Let a backward fail midway and be abandoned; return the gradients of the whole step that follows."""
    settings = {"zero_stage": stage, "contiguous_gradients": contiguous, "reduce_bucket_size": 10_000}
    run = placed(rank, small_run(**settings), dp=2, accumulation=2)
    run.step()

    def fail(gradient: Tensor) -> None:
        raise ZeroDivisionError

    @contextmanager
    def broken(micro: int) -> Iterator[None]:
        block = run.model.layers["0"]
        handle = block.mlp.register_forward_hook(lambda module, _, output: output.register_hook(fail) and None)
        try:
            yield
        finally:
            handle.remove()

    with pytest.raises(ZeroDivisionError):
        run.step(around=lambda micro: broken(micro) if micro == failing else nullcontext())
    run.engine.reset_step()
    kept = run.step()
    run.engine.close()
    return kept


@pytest.mark.parametrize(("contiguous", "failing"), [(True, 0), (True, 1), (False, 0)])
@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_backward_leaves_nothing_behind(stage: int, contiguous: bool, failing: int) -> None:
    found = whole_gradients(run_ranks(2, step_after_a_failure, stage, contiguous, failing))
    assert_equal(found, expected(MICRO_BATCH * 4), EXACT)


class Made(TorchDispatchMode):
    """A dispatch mode that collects the operators that make new tensors of some shapes."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self.shapes = shapes
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape in self.shapes and _is_whole(result):
            self.operators.append(str(func))
        return result


def _is_whole(tensor: Tensor) -> bool:
    """Return True if the tensor is not a view of a larger one."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def made_in_backward(rank: int, stage: int, is_hooked: bool) -> tuple[list[str], list[str]]:
    """Return the operators in backward that make tensors of a weight's shape, and parameters left with a `.grad`."""
    run = placed(rank, small_run(zero_stage=stage, reduce_bucket_size=10_000), accumulation=2)
    weights = {name: p for name, p in run.model.named_parameters() if name.endswith(WEIGHTS)}
    for weight in weights.values() if is_hooked else ():
        weight.register_hook(lambda gradient: None)
    made = Made({weight.shape for weight in weights.values()})
    run.engine.begin_step()
    for micro in range(2):
        loss = run.loss(micro)
        with made:
            run.engine.backward(loss, is_last=micro == 1)
    run.engine.finish_reductions()
    left = [name for name, parameter in run.model.named_parameters() if parameter.grad is not None]
    run.engine.close()
    return made.operators, left


@pytest.mark.parametrize("stage", STAGES)
def test_no_gradient_of_a_weight_is_a_tensor_of_its_own(stage: int) -> None:
    [(made, left)] = run_ranks(1, made_in_backward, stage, False)
    assert made == []
    assert not any(name == TIED or name.endswith(WEIGHTS) for name in left)
    assert ("final_norm.weight" in left) == (stage < 2), "what autograd adds up lies in flat tensors, or has gone"
    [(made, _)] = run_ranks(1, made_in_backward, stage, True)
    assert len(made) >= 2 * 2 * len(WEIGHTS), "the same is seen where gradients go to hooks"
