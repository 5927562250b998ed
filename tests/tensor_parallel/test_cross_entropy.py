"""Losses and gradients of logits, computed in place and fused, equal those of torch's cross-entropy in float64."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.each import each
from support.processes import mesh_in_worker, run_ranks
from support.thread_world import run_threads
from torch import Tensor

from megazero.comm.interface import Communicator
from megazero.comm.local import LocalCommunicator
from megazero.model.compiled import lacking
from megazero.tensor_parallel.cross_entropy import FusedSoftmax, InPlaceSoftmax, Labels, Softmax, _block_width

TOKENS, PADDED, REAL = 7, 12, 9
LACKING = lacking(torch.device("cpu"))
FUSED = pytest.param("fused", marks=pytest.mark.skipif(bool(LACKING), reason=f"this machine lacks {LACKING}"))
KINDS: dict[str, Callable[[], Softmax]] = {
    "in place": InPlaceSoftmax,
    "fused": FusedSoftmax,
    "fused, plain": partial(FusedSoftmax, compile=False),
}
BOUND = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def draw(dtype: torch.dtype, *, weighted: bool, real: int = REAL) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw logits [n, Vp] of some tens, labels [n] and weights [n]; logits of padding are 1e4 and must not matter."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(TOKENS, PADDED, generator=generator, dtype=torch.float64) * 20
    logits[:, real:] = 1e4
    labels = torch.randint(real, (TOKENS,), generator=generator)
    labels[0], labels[1] = 0, real - 1
    weights = torch.arange(TOKENS, dtype=torch.float64) / 3 if weighted else None
    return logits.to(dtype), labels, weights


def plain(logits: Tensor, labels: Tensor, weights: Tensor | None, real: int = REAL) -> tuple[Tensor, Tensor]:
    """Return torch's losses and the gradient of their weighted sum, which is zero in padding."""
    x = logits.double().requires_grad_(True)
    losses = F.cross_entropy(x[:, :real], labels, reduction="none")
    (losses if weights is None else losses * weights).sum().backward()
    assert x.grad is not None
    return losses.detach(), x.grad


def found(
    softmax: Softmax, dtype: torch.dtype, *, weighted: bool, axis: Communicator, real: int = REAL
) -> tuple[Tensor, Tensor]:
    """Return the losses and the gradient that `softmax` finds from this rank's columns of the logits."""
    logits, labels, weights = draw(dtype, weighted=weighted, real=real)
    mine = logits.chunk(axis.size, dim=1)[axis.rank].clone()
    losses, differentiate = softmax.losses(mine, Labels(labels, weights, real), axis)
    differentiate()
    return losses, mine


# A compilation takes seconds, so the fused loss is compiled for each dtype with weights or without.
@pytest.mark.parametrize(
    ("kind", "dtype", "weighted"),
    [
        *(
            (kind, dtype, weighted)
            for kind in ("in place", "fused, plain")
            for dtype in BOUND
            for weighted in (False, True)
        ),
        *(
            pytest.param(*FUSED.values, dtype, weighted, marks=FUSED.marks)
            for dtype, weighted in ((torch.float32, False), (torch.bfloat16, True))  # float64 is with two ranks
        ),
    ],
    ids=str,
)
def test_losses_and_gradients_are_those_of_torch(kind: str, dtype: torch.dtype, weighted: bool) -> None:
    """Where it is compiled, the fused loss is three graphs without a break: they read the logits as they are."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    losses, gradient = found(KINDS[kind](), dtype, weighted=weighted, axis=LocalCommunicator())
    expected_losses, expected_gradient = plain(*draw(dtype, weighted=weighted))
    assert losses.dtype == torch.promote_types(dtype, torch.float32) and gradient.dtype == dtype
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 3 * (kind == "fused") and not counters["graph_break"]
    bound = BOUND[dtype]
    loss_bound = min(bound, 1e-6)  # losses have at least the precision of float32
    torch.testing.assert_close(losses.double(), expected_losses, rtol=loss_bound, atol=loss_bound)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=bound, atol=bound)


@each("kind", ["in place", "fused, plain"])
@each("real", [REAL, 12, 5, 3])
@each("size", [1, 2, 3])
def test_any_rank_may_hold_the_peak_or_only_padding(size: int, real: int, kind: str) -> None:
    """Totals for the peak of a rank's own columns are those of the whole, also if that rank has padding alone."""

    def on_rank(axis: Communicator) -> tuple[Tensor, Tensor]:
        return found(KINDS[kind](), torch.float64, weighted=True, axis=axis, real=real)

    results = run_threads(size, on_rank)
    expected_losses, expected_gradient = plain(*draw(torch.float64, weighted=True, real=real), real=real)
    for losses, _ in results:
        torch.testing.assert_close(losses, expected_losses, rtol=1e-12, atol=1e-12)
    whole = torch.cat([gradient for _, gradient in results], dim=1)
    torch.testing.assert_close(whole, expected_gradient, rtol=1e-12, atol=1e-12)


@each("real", [1536, 1400, 1000, 511])
def test_blocks_of_columns_have_the_sums_of_the_whole(real: int) -> None:
    """Three blocks of 512 columns, of which the last, or the last two, may be padding alone."""
    assert _block_width(1536) == 512
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(TOKENS, 1536, generator=generator, dtype=torch.float64) * 20
    logits[3] -= 1e4
    labels = torch.randint(real, (TOKENS,), generator=generator)
    expected_losses, expected_gradient = plain(logits.clone(), labels, None, real=real)
    softmax = FusedSoftmax(compile=False)
    losses, differentiate = softmax.losses(logits, Labels(labels, None, real), LocalCommunicator())
    differentiate()
    torch.testing.assert_close(losses, expected_losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits, expected_gradient, rtol=1e-12, atol=1e-12)


def test_a_block_fills_most_of_a_power_of_two() -> None:
    widths = {50304: 786, 50257: 50257, 128256: 1002, 32000: 1000, 25152: 786, 1024: 1024, 768: 256, 97: 97, 12: 12}
    assert {width: _block_width(width) for width in widths} == widths


@each("kind", ["in place", "fused, plain"])
@each("value", [torch.inf, -torch.inf, torch.nan])
def test_logits_that_are_not_finite_make_the_loss_of_their_token_not_finite(value: float, kind: str) -> None:
    """A label of minus infinity has an infinite loss; plus infinity and NaN anywhere make losses NaN."""
    logits, labels, _ = draw(torch.float64, weighted=False)
    logits[2, int(labels[2])] = value
    losses, _ = KINDS[kind]().losses(logits, Labels(labels, None, REAL), LocalCommunicator())
    assert torch.isfinite(losses).tolist() == [token != 2 for token in range(TOKENS)]


def differences(rank: int, size: int, reals: Sequence[int], kind: str) -> list[float]:
    """Return the largest differences of a rank's losses and gradient columns from those of the whole logits."""
    axis, softmax, found_ = mesh_in_worker(rank, tp=size).axis("tp"), KINDS[kind](), []
    for real in reals:
        losses, gradient = found(softmax, torch.float64, weighted=True, axis=axis, real=real)
        expected_losses, expected_gradient = plain(*draw(torch.float64, weighted=True, real=real), real=real)
        mine = expected_gradient.chunk(size, dim=1)[rank]
        found_ += [float((losses - expected_losses).abs().max()), float((gradient - mine).abs().max())]
    return found_


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("size", "reals", "kind"),
    [(4, [REAL], "in place"), pytest.param(2, [6], *FUSED.values, marks=FUSED.marks)],
)
def test_ranks_share_the_vocabulary(size: int, reals: Sequence[int], kind: str) -> None:
    """Ranks that share the vocabulary agree with one, also where the last of them holds only padding."""
    results: Any = run_ranks(size, differences, size, reals, kind)
    assert max(max(rank) for rank in results) < 1e-12


def check_kernel(device: str, dtype: torch.dtype, shapes: Sequence[tuple[int, int, int]]) -> None:
    """Compare the kernel's losses and gradients of (tokens, columns, real columns) with float64, weighted and not."""
    from megazero.tensor_parallel import cross_entropy_kernel

    generator = torch.Generator().manual_seed(11)
    for num_rows, width, real in shapes:
        logits = (torch.randn(num_rows, width, generator=generator) * 5).to(dtype)
        logits[:, real:] = 1e4
        labels = torch.randint(real, (num_rows,), generator=generator)
        labels[0] = real - 1
        for weights in (None, torch.rand(num_rows, generator=generator)):
            expected_losses, expected_gradient = plain(logits, labels, weights, real)
            mine, ids = logits.to(device, copy=True), labels.to(device)
            given = None if weights is None else weights.to(device)
            for wants_gradient, bound, expected in ((False, 0.0, logits), (True, 4e-3, expected_gradient)):
                losses = cross_entropy_kernel.losses(mine, ids, given, real, wants_gradient=wants_gradient)
                torch.testing.assert_close(losses.cpu().double(), expected_losses, rtol=1e-6, atol=1e-5)
                bound = min(bound, 1e-6) if dtype == torch.float32 else bound
                torch.testing.assert_close(mine.cpu().double(), expected.double(), rtol=bound, atol=bound)


# Rows of one block and of several, the last of them padding in part.
GPU_SHAPES = [(7, 12, 9), (1, 1, 1), (3, 40_001, 40_001), (5, 50_304, 50_257), (2, 50_304, 30_000)]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpus_kernel_has_the_losses_and_gradients_of_torch(dtype: torch.dtype) -> None:
    check_kernel("cuda", dtype, GPU_SHAPES)
    logits, labels, _ = draw(dtype, weighted=False)
    mine = logits.cuda()
    losses, differentiate = FusedSoftmax().losses(mine, Labels(labels.cuda(), None, REAL), LocalCommunicator())
    differentiate()
    expected_losses, expected_gradient = plain(logits, labels, None)
    torch.testing.assert_close(losses.cpu().double(), expected_losses, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(mine.cpu().double(), expected_gradient, rtol=4e-3, atol=4e-3)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: it comes with torch for GPUs")
def test_the_kernel_as_triton_interprets_it_on_a_cpu() -> None:
    words = f"import test_cross_entropy as t, torch; t.check_kernel('cpu', torch.bfloat16, {GPU_SHAPES[:3]})"
    words += "; t.check_kernel('cpu', torch.float32, [(2, 5000, 4100)])"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", words], env=environment, check=True)


@pytest.mark.cuda
@each("value", [torch.inf, -torch.inf, torch.nan])
def test_a_gpus_kernel_shows_logits_that_are_not_finite(value: float) -> None:
    logits, labels, _ = draw(torch.float32, weighted=False)
    logits[2, int(labels[2])] = value
    losses, _ = FusedSoftmax().losses(logits.cuda(), Labels(labels.cuda(), None, REAL), LocalCommunicator())
    assert torch.isfinite(losses).tolist() == [token != 2 for token in range(TOKENS)]
