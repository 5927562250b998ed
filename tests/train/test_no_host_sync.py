"""A training step never makes the host wait for a GPU: calls that would make it wait are counted on a CPU.

Two kinds of calls wait: those that read a device's values (`item`, a truth value, shapes that depend on values), and
those that bring the host's values to the device by a plain copy (`torch.tensor`, `.to` without non_blocking).  Reads
are counted as operations, from Python and from C++; calls that run no operation on a CPU are counted in Python.

This holds for every precision: fp16's decision to skip a step is made on the device, and the loop reads it later.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_ranks
from support.small_runs import EOD, DrawnSamples, core_on_rank, tiny_run
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import megazero
from megazero.data.loader import BatchLoader
from megazero.train.build import batch_layout, step_context
from megazero.train.step import StepControls, training_step

OURS = str(Path(megazero.__file__).parent)
STEPS = 3

# Operations that read values; indexing by a mask does too, because the size of its result depends on the mask.
READING = frozenset(["_local_scalar_dense", "is_nonzero", "nonzero", "equal", "allclose", "masked_select", "bincount"])
UNIQUE = frozenset(["_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"])
INDEXING = frozenset(["index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"])
# Calls that run no operation where the host is the device.
HOSTWARD = frozenset(["tolist", "numpy", "cpu", "__array__", "item", "__bool__", "__float__", "__int__", "__index__"])
DEVICEWARD = frozenset(["tensor", "as_tensor", "scalar_tensor", "from_numpy"])


class _Operations(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        masked = name in INDEXING and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        by_tensor = name == "repeat_interleave" and func._overloadname != "self_int"
        if name in READING | UNIQUE or masked or by_tensor:
            self._found.append(f"{name} {_where()}")
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, given = getattr(func, "__name__", ""), kwargs or {}
        moves = name == "to" and any(isinstance(a, str | torch.device) for a in (*args[1:], *given.values()))
        if name in HOSTWARD | DEVICEWARD or (moves and not given.get("non_blocking")):
            self._found.append(f"{name} {_where()}")
        return func(*args, **given)


@contextmanager
def counted() -> Iterator[list[str]]:
    """Yield a list that collects each waiting operation or call of the block: its name and its place in megazero."""
    found: list[str] = []
    with _Calls(found), _Operations(found):
        yield found


def _where() -> str:
    """Return the innermost line of megazero on the stack, or "outside" if there is none, as in torch's own backward."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(OURS)]
    return f"{Path(frames[-1].filename).relative_to(OURS)}:{frames[-1].lineno}" if frames else "outside"


def waits_of_steps(rank: int, settings: dict[str, Any], layout: dict[str, int]) -> list[str]:
    """Return the waits of some steps of two micro-batches, including the first step's allocations and recordings."""
    config = tiny_run(**settings, global_batch_size=8, eod_mask_loss=True, clip_grad=0.5, weight_decay=0.1)
    core = core_on_rank(rank, config, **layout, is_late=False)  # late works would read values to check them
    parts = step_context(config, core)
    with BatchLoader(DrawnSamples(), batch_layout(config, core.mesh, EOD), prefetch=0) as loader:
        batches = [next(loader) for _ in range(STEPS)]
    with counted() as found:
        reports = [training_step(parts, batch, StepControls(1e-2, 1.0)) for batch in batches]
    assert all(report.loss.isfinite() for report in reports)
    core.engine.close()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_of_one_process_waits_for_nothing(stage: int, precision: str) -> None:
    assert waits_of_steps(0, {"zero_stage": stage, "precision": precision}, {}) == []


@pytest.mark.gloo
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_of_two_processes_waits_for_nothing(stage: int, precision: str) -> None:
    settings = {"zero_stage": stage, "precision": precision, "micro_batch_size": 2}
    assert run_ranks(2, waits_of_steps, settings, {"dp": 2}) == [[], []]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        ({"tensor_model_parallel_size": 2}, {"tp": 2}),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True, "recompute_granularity": "full"}, {"tp": 2}),
        ({"pipeline_model_parallel_size": 2}, {"pp": 2}),
        ({"pipeline_model_parallel_size": 2, "pipeline_schedule": "zero-bubble"}, {"pp": 2}),
        ({"pipeline_model_parallel_size": 2, "reset_position_ids": True, "reset_attention_mask": True}, {"pp": 2}),
        ({"hidden_dropout": 0.1, "attention_dropout": 0.1, "recompute_granularity": "full"}, {"dp": 2}),
    ],
    ids=str,
)
def test_nor_does_one_of_another_layout(settings: dict[str, Any], layout: dict[str, int]) -> None:
    assert run_ranks(2, waits_of_steps, {"precision": "bf16", **settings}, layout) == [[], []]


def test_what_waits_is_seen() -> None:
    """Every way to read a value from the device or bring one to it is counted; the ways that a step uses are not."""
    x, mask, table = torch.arange(4.0), torch.tensor([True, False, True, False]), torch.zeros(3, 2)
    waiting: dict[str, Callable[[], Any]] = {
        "item": lambda: x[1].item(),
        "__float__": lambda: float(x[1]),
        "__bool__": lambda: bool(x[1]),
        "tolist": lambda: x.tolist(),
        "numpy": lambda: x.numpy(),
        "cpu": lambda: x.cpu(),
        "to": lambda: x.to("cpu"),
        "tensor": lambda: torch.tensor([1.0]),
        "nonzero": lambda: x.nonzero(),
        "index": lambda: x[mask],
        "masked_select": lambda: x.masked_select(mask),
        "equal": lambda: torch.equal(x, x),
        "_unique2": lambda: x.unique(),
        "index_put_": lambda: x.__setitem__(mask, torch.ones(2)),
    }
    for name, call in waiting.items():
        with counted() as found:
            call()
        assert name in [each.split()[0] for each in found], name
    with counted() as found:
        y = torch.where(mask, x, 0.0) * 2 + x[torch.arange(2)].sum()
        table.index_add_(0, torch.arange(2), torch.ones(2, 2))
        y.to(torch.float64).to("cpu", non_blocking=True).masked_fill_(mask, 1.0)
    assert found == []


class _Reading(torch.autograd.Function):
    """A function that reads a value of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float(grad.abs().max().item() < 1.0)


def test_backward_is_watched_too() -> None:
    x = torch.ones(3, requires_grad=True)
    with counted() as found:
        _Reading.apply(x).sum().backward()
    assert any(each.startswith("_local_scalar_dense") for each in found)
