"""Tests norms against numpy in float64, clipping against torch's, and which parameter is named for an overflow."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.each import each
from torch import Tensor

from megazero.memory.fused_buffers import FusedBuffers
from megazero.optim.grad_norm import clip_coefficient, first_overflow, fragment_norms

CPU = torch.device("cpu")
BUFFERS = FusedBuffers(1 << 16, CPU)
ALL_FINITE = 2**31 - 1


def random(numel: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@each(
    ("dtype", "rtol"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)],
    ids=str,
)
def test_norms(dtype: torch.dtype, rtol: float) -> None:
    fragments = [random(numel, numel, dtype) for numel in (1, 7, 1000, 4096)]
    norms = fragment_norms(fragments, CPU, BUFFERS)
    expected = [np.linalg.norm(fragment.double().numpy()) for fragment in fragments]
    assert norms.dtype == torch.float64
    np.testing.assert_allclose(norms.numpy(), expected, rtol=rtol)


def test_narrow_squares_do_not_overflow() -> None:
    """The norm of fp16 values of 60000 is right, although their squares are not finite in fp16."""
    (norm,) = fragment_norms([torch.full((100,), 60000.0, dtype=torch.float16)], CPU, BUFFERS).tolist()
    assert norm == pytest.approx(600_000, rel=1e-6)


def test_narrow_squares_do_not_vanish() -> None:
    (norm,) = fragment_norms([torch.full((100,), 1e-6, dtype=torch.float16)], CPU, BUFFERS).tolist()
    assert norm == pytest.approx(10 * torch.tensor(1e-6, dtype=torch.float16).item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wider_copies_are_made_in_a_buffer(dtype: torch.dtype) -> None:
    """No memory of a fragment's size is allocated, not even inside kernels; narrow fragments share one buffer."""
    buffers = FusedBuffers(1 << 16, CPU)
    fragments = [random(1 << 14, seed, dtype) for seed in range(3)]
    fragment_norms(fragments, CPU, buffers)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        fragment_norms(fragments, CPU, buffers)
    allocated = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert allocated and max(allocated) < 1024
    assert buffers.num_buffers == (dtype == torch.bfloat16)


def test_no_fragments_and_empty_fragments() -> None:
    assert fragment_norms([], CPU, BUFFERS).shape == (0,)
    assert fragment_norms([], CPU, BUFFERS).square().sum().item() == 0.0
    assert fragment_norms([torch.zeros(0), torch.ones(4)], CPU, BUFFERS).tolist() == [0.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_what_is_not_finite_shows_in_its_own_norm_only(dtype: torch.dtype) -> None:
    fragments = [torch.ones(4, dtype=dtype) for _ in range(4)]
    fragments[1][2], fragments[2][0], fragments[3][1] = torch.inf, torch.nan, -torch.inf
    norms = fragment_norms(fragments, CPU, BUFFERS).tolist()
    assert norms[:2] == [2.0, math.inf] and math.isnan(norms[2]) and norms[3] == math.inf


@each("max_norm", [0.5, 1.0, 1e3])
@each("scale", [1e-8, 0.1, 1.0, 50.0])
def test_clipping_equals_torchs(max_norm: float, scale: float) -> None:
    parameters = [torch.zeros(numel, dtype=torch.float64, requires_grad=True) for numel in (3, 50)]
    for number, parameter in enumerate(parameters):
        parameter.grad = random(parameter.numel(), number) * scale
    ours = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    coefficient = clip_coefficient(norm, max_norm)
    assert coefficient.shape == () and coefficient <= 1
    for gradient, parameter in zip(ours, parameters, strict=True):
        torch.testing.assert_close(gradient * coefficient, parameter.grad, rtol=1e-14, atol=0)


@pytest.mark.parametrize("norm", [0.0, 1e-3, 1e6])
def test_zero_means_no_clipping(norm: float) -> None:
    assert clip_coefficient(torch.tensor(norm, dtype=torch.float64), 0.0).item() == 1.0


def test_nothing_to_clip() -> None:
    assert clip_coefficient(torch.tensor(0.0, dtype=torch.float64), 1.0).item() == 1.0


def test_a_norm_that_is_not_finite_gives_no_step() -> None:
    assert clip_coefficient(torch.tensor(torch.inf), 1.0).item() == 0.0
    assert clip_coefficient(torch.tensor(torch.nan), 1.0).isnan()


@each(
    ("norms", "parameters", "first"),
    [
        ([], [], ALL_FINITE),
        ([1.0, 2.0], [4, 5], ALL_FINITE),
        ([1.0, math.inf], [4, 5], 5),
        ([math.nan, math.inf], [4, 5], 4),
        # Fragments come in the layout's order, parameters in the model's; the smallest parameter index counts.
        ([math.inf, 1.0, math.nan], [9, 1, 3], 3),
        ([math.inf, 1.0], [0, 0], 0),
    ],
)
def test_who_overflowed_first(norms: list[float], parameters: list[int], first: int) -> None:
    found = first_overflow(torch.tensor(norms, dtype=torch.float64), torch.tensor(parameters, dtype=torch.int32))
    assert (found.item(), found.dtype, found.shape) == (first, torch.int32, ())


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.5, math.inf, math.nan]), st.integers(0, 99)), max_size=12))
def test_first_overflow_is_the_least_index_that_is_not_finite(rows: list[tuple[float, int]]) -> None:
    expected = min((index for norm, index in rows if not math.isfinite(norm)), default=ALL_FINITE)
    norms = torch.tensor([norm for norm, _ in rows], dtype=torch.float64)
    indices = torch.tensor([index for _, index in rows], dtype=torch.int32)
    assert first_overflow(norms, indices).item() == expected
