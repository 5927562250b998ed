"""Tests of the end of a step on one rank: figures summed along with the norm, clipping and overflow."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megazero
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.timers import Timers
from megazero.zero.step import first_overflow, reduce_gradients, update_parameters

X = torch.tensor([[1.0, 2.0, -2.0]])
TIMERS = Timers(torch.device("cpu"), level=2)


def with_gradients(kind: str, precision: str, factor: float) -> DataParallelEngine:
    """Return a linear layer's engine after a backward: rows of the weight have gradient factor * X, biases factor."""
    config = {"zero": {"zero_stage": 1}, "precision": {"precision": precision}, "optimizer": {"type": kind, "lr": 1.0}}
    torch.manual_seed(1)
    engine = megazero.initialize(nn.Linear(3, 2), config)
    engine.backward(engine(X.to(engine.module.weight.dtype)).sum() * factor)
    return engine


def weights(engine: DataParallelEngine) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in engine.module.parameters()]


def test_norm_and_figures_come_together() -> None:
    core = with_gradients("SGD", "fp64", 1.0).zero_engine
    reduced = reduce_gradients(core, TIMERS, torch.tensor(3.0).double(), torch.tensor(-1.0).double())
    assert reduced.square.item() == pytest.approx(2 * 9 + 2) and [f.item() for f in reduced.figures] == [3.0, -1.0]


@pytest.mark.parametrize(("clip", "factor"), [(0.0, 0.5), (1e6, 0.5), (0.25, 0.25 / 20**0.5)])
def test_gradients_are_scaled_then_clipped(clip: float, factor: float) -> None:
    engine = with_gradients("SGD", "fp64", 1.0)
    before = weights(engine)
    reduced = reduce_gradients(engine.zero_engine, TIMERS)
    update = update_parameters(engine.zero_engine, TIMERS, reduced, scale=0.5, clip_grad=clip, lr=None)
    engine.zero_engine.ensure_parameters()
    assert (
        update.skipped is not None
        and update.skipped.item() == 0.0
        and update.grad_norm.item() == pytest.approx(0.5 * 20**0.5)
    )
    for old, new, gradient in zip(before, weights(engine), (X.double().expand(2, 3), torch.ones(2)), strict=True):
        torch.testing.assert_close(new, old - factor * gradient, rtol=1e-5, atol=1e-6)
    assert {"all-grads-sync", "optimizer"} <= TIMERS.take().read().keys()


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_an_overflow_skips_the_update(kind: str) -> None:
    engine = with_gradients(kind, "fp16", 1e5)
    before = weights(engine)
    reduced = reduce_gradients(engine.zero_engine, TIMERS)
    lr = 1.0 if kind == "AdamW" else None
    update = update_parameters(engine.zero_engine, TIMERS, reduced, scale=1.0, clip_grad=1.0, lr=lr)
    engine.zero_engine.ensure_parameters()
    assert update.skipped is not None and update.skipped.item() == 1.0
    assert first_overflow(engine.zero_engine, int(reduced.first_overflow.item())) == "weight"
    assert all(torch.equal(*pair) for pair in zip(before, weights(engine), strict=True))
    assert engine.zero_engine.optimizer_step.item() == 0.0


class Operations(TorchDispatchMode):
    """A dispatch mode that records operations on elements of tensors with at least `numel` of them."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self._numel = numel
        self.names: list[str] = []
        self.factors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        is_pass = not func.is_view and func.__name__ != "empty.memory_format"
        if is_pass and any(tensor.numel() >= self._numel for tensor in tensors):
            self.names.append(func.__name__.split(".")[0])
            self.factors += [args[1]] if self.names[-1] in ("mul", "mul_") else []
        return out


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("fp64", ["mul", "_fused_adamw_"]),
        ("fp32", ["mul", "_fused_adamw_"]),
        ("bf16", ["copy_", "mul_", "_fused_adamw_", "copy_"]),
    ],
)
def test_passes_over_the_weights_in_an_update(precision: str, expected: list[str]) -> None:
    """Gradients are scaled, weights updated, and cast to working parameters, in that order and once each.

    The factor of the gradients is of the master weights' dtype, and has a dim.
    On a CPU narrow gradients are scaled in two operations on a piece in the cache; on a GPU in one
    (`tests/optim/test_inner.py`).
    """
    core = with_gradients("AdamW", precision, 1.0).zero_engine
    reduced = reduce_gradients(core, TIMERS)
    with Operations(8) as seen:
        update_parameters(core, TIMERS, reduced, scale=1 / 3, clip_grad=1.0, lr=1.0)
    assert seen.names == expected
    assert [(factor.dtype, factor.shape) for factor in seen.factors] == [(core.plan.optimizer.dtype, (1,))]
