"""The head's loss in chunks gives plain torch's loss and gradients, with less memory and without needless products."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.each import each
from support.processes import mesh_in_worker, run_ranks
from support.thread_world import run_threads
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.comm.interface import Communicator, ReduceKind, Work
from megazero.comm.local import LocalCommunicator
from megazero.comm.metered import Meter, MeteredCommunicator
from megazero.errors import UsageError
from megazero.memory.ledger import Ledger
from megazero.parallel.gradient_slot import GradientSlot, attach_gradient_slot
from megazero.tensor_parallel.cross_entropy import IN_PLACE, Labels
from megazero.tensor_parallel.head_loss import Targets, row_chunks, summed_cross_entropy
from megazero.tensor_parallel.regions import Border

HIDDEN, TOKENS, PADDED = 7, 11, 18
FACTOR = 0.37  # a factor on the loss before backward
VOCABULARIES = [13, 5, 18]  # on the last rank some padding; 2 of 3 ranks with padding only; no padding
ALONE = LocalCommunicator()


class Case(NamedTuple):
    """Inputs of the head: x [tokens, h], matrix [V, h], labels and token weights [tokens]."""

    x: Tensor
    matrix: Tensor
    labels: Tensor
    token_weights: Tensor | None


class Found(NamedTuple):
    """A loss and its gradients; grad_weight has this rank's rows including padding, or those of the whole matrix."""

    loss: Tensor
    grad_x: Tensor
    grad_weight: Tensor


@each(
    ("num_rows", "most", "num_parts", "lengths"),
    [
        (65536, 5336, 1, [5120] * 9 + [4864] * 4),  # GPT-2 124M on a GPU: fewest chunks, whole tiles
        (65536, 5042, 1, [4864] * 4 + [4608] * 10),  # one chunk more than the fewest, for whole tiles
        (16384, 5336, 1, [4096] * 4),
        (32768, 2668, 2, [2560] * 9 + [2432] * 4),  # of two ranks' tokens: 128 of each are a tile
        (3000, 700, 1, [640, 632, 576, 576, 576]),
        (1024, 83, 1, [79] * 10 + [78] * 3),  # steps would take too many more chunks
        (1000, 1001, 1, [1000]),
        (8, 3, 2, [3, 3, 2]),
        (3, 0, 1, [1, 1, 1]),
        (0, 7, 1, []),
    ],
)
def test_chunks_of_rows(num_rows: int, most: int, num_parts: int, lengths: list[int]) -> None:
    assert [rows.stop - rows.start for rows in row_chunks(num_rows, most, num_parts)] == lengths


@each("num_parts", [1, 2, 3, 8])
def test_chunks_are_equal_up_to_a_step_and_within_the_limit(num_parts: int) -> None:
    """For many sizes: every row once, whole steps but in one chunk, the longest first, few more than the fewest."""
    for num_rows in (1, 2, 63, 64, 65, 257, 999, 1024, 4095, 20001):
        for most in (1, 2, 63, 64, 100, 255, 256, 300, 511, 513, 1000, 2303, 5336, 70000):
            chunks = row_chunks(num_rows, most, num_parts)
            lengths = [rows.stop - rows.start for rows in chunks]
            case = (num_rows, most, num_parts, lengths)
            assert [rows.start for rows in chunks] == [0, *(rows.stop for rows in chunks[:-1])], case
            assert chunks[-1].stop == num_rows and max(lengths) <= most, case
            assert lengths == sorted(lengths, reverse=True) and len(chunks) <= math.ceil(num_rows / most) * 9 / 8, case
            whole = [rows // math.gcd(rows, num_parts) for rows in (256, 64, 1)]
            step = next(step for step in whole if sum(length % step > 0 for length in lengths) <= 1)
            assert lengths[0] - lengths[-1] <= step, case
            if num_rows >= 8 * most and most >= 8 * whole[0]:
                assert step == whole[0], case


def draw(vocab_size: int, *, tokens: int = TOKENS, hidden: int = HIDDEN, masked: bool = True) -> Case:
    """Draw inputs with logits of some hundreds, so that softmax needs the maximum; with a mask, some weights are 0."""
    generator = torch.Generator().manual_seed(vocab_size + tokens)
    options: dict[str, Any] = {"dtype": torch.float64, "generator": generator}
    weights = torch.rand(tokens, **options) * (torch.arange(tokens) % 3 > 0)
    return Case(
        torch.randn(tokens, hidden, **options) * 40,
        torch.randn(vocab_size, hidden, **options) * 3,
        torch.randint(vocab_size, (tokens,), generator=generator),
        weights if masked else None,
    )


def plain(case: Case) -> Found:
    """Compute loss and gradients by plain torch from the whole logits in float64."""
    x, matrix = (tensor.double().clone().requires_grad_(True) for tensor in (case.x, case.matrix))
    losses = F.cross_entropy(x @ matrix.T, case.labels, reduction="none")
    loss = (losses if case.token_weights is None else losses * case.token_weights.double()).sum()
    (loss * FACTOR).backward()
    assert x.grad is not None and matrix.grad is not None
    return Found(loss.detach(), x.grad, matrix.grad)


def rows_of(matrix: Tensor, axis: Communicator) -> Tensor:
    """Return this rank's rows of the matrix, padded with rows of 1e4, which must not affect results."""
    return F.pad(matrix, (0, 0, 0, PADDED - len(matrix)), value=1e4).chunk(axis.size)[axis.rank].clone()


def chunked(case: Case, axis: Communicator, rows: int) -> Found:
    """Compute megazero's loss and gradients in chunks of `rows` tokens."""
    x, weight = case.x.clone().requires_grad_(True), rows_of(case.matrix, axis).requires_grad_(True)
    chunk_bytes = rows * weight.shape[0] * max(x.element_size(), 4)
    targets = Targets(case.labels, case.token_weights, len(case.matrix), chunk_bytes)
    loss = summed_cross_entropy(x, weight, targets, Border(axis))
    (loss * FACTOR).backward()
    assert x.grad is not None and weight.grad is not None
    return Found(loss.detach(), x.grad, weight.grad)


def check(results: list[Found], expected: Found, *, rtol: float, atol: float) -> None:
    for found in results:
        torch.testing.assert_close(found.loss, expected.loss, rtol=rtol, atol=atol)
        torch.testing.assert_close(found.grad_x, expected.grad_x, rtol=rtol, atol=atol)
    whole = torch.cat([found.grad_weight for found in results])
    num_real = len(expected.grad_weight)
    torch.testing.assert_close(whole[:num_real], expected.grad_weight, rtol=rtol, atol=atol)
    assert not whole[num_real:].any(), "padding has no gradient"


@each("masked", [False, True])
@each("rows", [1, 3, TOKENS, 1000])
@each("vocab_size", VOCABULARIES)
@each("size", [1, 2, 3])
def test_losses_and_gradients_are_plain_torchs(size: int, vocab_size: int, rows: int, masked: bool) -> None:
    case = draw(vocab_size, masked=masked)
    check(run_threads(size, lambda axis: chunked(case, axis, rows)), plain(case), rtol=1e-12, atol=1e-12)


def chunked_on_rank(rank: int, size: int, vocab_size: int, rows: int) -> Found:
    return chunked(draw(vocab_size), mesh_in_worker(rank, tp=size).axis("tp"), rows)


@pytest.mark.gloo
@pytest.mark.parametrize(("size", "rows"), [(2, 1), (3, 4)])
def test_real_ranks_with_reductions_in_flight(size: int, rows: int) -> None:
    results = run_ranks(size, chunked_on_rank, size, 13, rows)
    check(results, plain(draw(13)), rtol=1e-12, atol=1e-12)


def test_less_memory_than_one_tokens_logits_is_one_token_at_a_time() -> None:
    case = draw(13)
    x, weight = case.x.clone().requires_grad_(True), case.matrix.clone().requires_grad_(True)
    with Products() as products:
        loss = summed_cross_entropy(x, weight, Targets(case.labels, case.token_weights, 13, 1), Border(ALONE))
    assert products.count == 3 * TOKENS
    torch.testing.assert_close(loss.detach(), plain(case).loss, rtol=1e-12, atol=0)


def test_shapes_of_batches_and_no_token_at_all() -> None:
    case = draw(13, tokens=12)
    assert case.token_weights is not None
    x = case.x.view(3, 4, HIDDEN).clone().requires_grad_(True)
    targets = Targets(case.labels.view(3, 4), case.token_weights.view(3, 4), 13, 500)
    loss = summed_cross_entropy(x, case.matrix, targets, Border(ALONE))
    (loss * FACTOR).backward()
    expected = plain(case)
    torch.testing.assert_close(loss.detach(), expected.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(x.grad, expected.grad_x.view(3, 4, HIDDEN), rtol=1e-12, atol=1e-12)
    nothing = chunked(Case(case.x[:0], case.matrix, case.labels[:0], None), ALONE, 3)
    assert nothing.loss == 0 and nothing.grad_x.shape == (0, HIDDEN) and not nothing.grad_weight.any()


class DenseOnly(LocalCommunicator):
    """A communicator that refuses to sum a strided tensor, because gloo sums one wrongly."""

    def all_reduce(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        assert tensor.is_contiguous()
        return super().all_reduce(tensor, kind)


def test_strided_hidden_states() -> None:
    case = draw(13)
    x = case.x.T.contiguous().T.requires_grad_(True)
    assert not x.is_contiguous()
    loss = summed_cross_entropy(x, case.matrix, Targets(case.labels, case.token_weights, 13, 400), Border(DenseOnly()))
    (loss * FACTOR).backward()
    torch.testing.assert_close(x.grad, plain(case).grad_x, rtol=1e-12, atol=1e-12)


def test_a_tied_matrix_gets_both_gradients() -> None:
    case = draw(13)
    ids = torch.arange(TOKENS) % 13
    found = []
    for ours in (True, False):
        matrix = case.matrix.clone().requires_grad_(True)
        x = F.embedding(ids, matrix).tanh() * case.x
        if ours:
            loss = summed_cross_entropy(x, matrix, Targets(case.labels, case.token_weights, 13, 400), Border(ALONE))
        else:
            loss = (F.cross_entropy(x @ matrix.T, case.labels, reduction="none") * case.token_weights).sum()
        loss.backward()
        found.append(matrix.grad)
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


def test_tokens_that_count_nothing_have_exactly_no_gradient() -> None:
    case = draw(13)
    assert case.token_weights is not None
    found = chunked(case, ALONE, 4)
    silent = case.token_weights == 0
    assert silent.any() and not found.grad_x[silent].any()
    assert found.grad_x[~silent].any(-1).all()
    nobody = chunked(case._replace(token_weights=torch.zeros(TOKENS)), ALONE, 4)
    assert nobody.loss == 0 and not nobody.grad_x.any() and not nobody.grad_weight.any()


# --- the sequence split -----------------------------------------------------------------------------------------------


def chunked_parts(case: Case, axis: Communicator, rows: int) -> Found:
    """Compute megazero's loss of this rank's part of the tokens in chunks of `rows` tokens of each rank."""
    num_tokens = len(case.x) // axis.size
    mine = slice(axis.rank * num_tokens, (axis.rank + 1) * num_tokens)
    x, weight = case.x[mine].clone().requires_grad_(True), rows_of(case.matrix, axis).requires_grad_(True)
    chunk_bytes = axis.size * rows * weight.shape[0] * max(x.element_size(), 4)
    targets = Targets(case.labels.view(axis.size, -1), case.token_weights, len(case.matrix), chunk_bytes)
    loss = summed_cross_entropy(x, weight, targets, Border(axis, splits_sequence=True))
    (loss * FACTOR).backward()
    assert x.grad is not None and weight.grad is not None
    return Found(loss.detach(), x.grad, weight.grad)


def joined(results: list[Found]) -> list[Found]:
    """Return the results with the whole gradient of x in place of each rank's part."""
    whole = torch.cat([found.grad_x for found in results])
    return [found._replace(grad_x=whole) for found in results]


@each("masked", [False, True])
@each("rows", [1, 3, 7, 1000])
@each("vocab_size", VOCABULARIES)
@each("size", [2, 3])
def test_split_losses_and_gradients_are_plain_torchs(size: int, vocab_size: int, rows: int, masked: bool) -> None:
    case = draw(vocab_size, tokens=7 * size, masked=masked)
    results = run_threads(size, lambda axis: chunked_parts(case, axis, rows))
    check(joined(results), plain(case), rtol=1e-12, atol=1e-12)


def chunked_parts_on_rank(rank: int, size: int, rows: int) -> tuple[Found, dict[str, int]]:
    mesh = mesh_in_worker(rank, tp=size)
    found = chunked_parts(draw(13, tokens=7 * size), mesh.axis("tp"), rows)
    return found, mesh.meter.bytes_by_axis()["tp"]


@pytest.mark.gloo
@pytest.mark.parametrize(("size", "rows"), [(2, 1), (2, 9), (3, 4)])
def test_real_ranks_with_parts_in_flight(size: int, rows: int) -> None:
    results = run_ranks(size, chunked_parts_on_rank, size, rows)
    check(joined([found for found, _ in results]), plain(draw(13, tokens=7 * size)), rtol=1e-12, atol=1e-12)
    part = 7 * HIDDEN * 8 * (size - 1)
    figures = 2 * 7 * 3 * 8 * (size - 1)  # all-reduces of maxima, sums and target logits
    for _, sent in results:
        assert sent == {"all_gather": part, "reduce_scatter": part, "all_reduce": figures}


@pytest.mark.parametrize("size", [2, 3])
def test_the_chunk_of_split_tokens_is_as_large_as_one_of_whole_tokens(size: int) -> None:
    """The limit in bytes holds for the logits of all ranks' tokens in a chunk, but for one token of each at least."""
    case = draw(18, tokens=8 * size)
    row_bytes = PADDED // size * 8

    def products(axis: Communicator, chunk_bytes: int) -> int:
        targets = Targets(case.labels, None, 18, chunk_bytes)
        x, weight = case.x.chunk(size)[axis.rank], rows_of(case.matrix, axis)
        with Products() as seen:
            summed_cross_entropy(x, weight, targets, Border(axis, splits_sequence=True))
        return seen.count

    for chunk_bytes, expected in ((1, 8), (4 * size * row_bytes, 2), (4 * size * row_bytes - 1, 3), (1 << 20, 1)):
        assert run_threads(size, lambda axis, limit=chunk_bytes: products(axis, limit)) == [expected] * size


def test_labels_of_a_part_of_the_tokens_are_our_own_bug() -> None:
    class Two(LocalCommunicator):
        size = 2

    with pytest.raises(AssertionError, match="all labels"):
        targets = Targets(torch.zeros(4, dtype=torch.int64), None, 13, 100)
        summed_cross_entropy(torch.ones(4, 3), torch.ones(13, 3), targets, Border(Two(), splits_sequence=True))


def test_split_bfloat16_gives_what_whole_bfloat16_does() -> None:
    case = mild(18, 24, 16, torch.bfloat16)
    expected = plain(case)
    results = joined(run_threads(2, lambda axis: chunked_parts(case, axis, 5)))
    whole = torch.cat([found.grad_weight for found in results])
    for found in results:
        assert found.loss.dtype == torch.float32 and found.grad_x.dtype == torch.bfloat16
        assert relative(found.loss, expected.loss) < 2 * HALF_ULP
        assert relative(found.grad_x, expected.grad_x) < 4 * HALF_ULP
    assert relative(whole, expected.grad_weight) < 4 * HALF_ULP


# --- gradients that are not needed are not computed -------------------------------------------------------------------


class Products(TorchDispatchMode):
    """A dispatch mode that counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.__name__.split(".")[0] in ("mm", "addmm", "addmm_")
        return func(*args, **(kwargs or {}))


@each(
    ("x_wants", "weight_wants", "grad_enabled", "products", "reductions"),
    [
        (True, True, True, 3, 3),
        (False, True, True, 2, 2),
        (True, False, True, 2, 3),
        (False, False, True, 1, 2),
        (True, True, False, 1, 2),
    ],
)
def test_only_gradients_that_are_wanted(
    x_wants: bool, weight_wants: bool, grad_enabled: bool, products: int, reductions: int
) -> None:
    """A chunk has a product for the logits and each needed gradient; maxima, sums and x's gradient are all-reduced."""
    case, expected = draw(13), plain(draw(13))
    x, weight = case.x.clone().requires_grad_(x_wants), case.matrix.clone().requires_grad_(weight_wants)
    meter = Meter()
    axis = MeteredCommunicator(ALONE, "tp", meter)
    with torch.set_grad_enabled(grad_enabled), Products() as seen:
        loss = summed_cross_entropy(x, weight, Targets(case.labels, case.token_weights, 13, 3 * 13 * 8), Border(axis))
    chunks = 4
    assert (seen.count, meter.count("tp", "all_reduce").calls) == (products * chunks, reductions * chunks)
    torch.testing.assert_close(loss.detach(), expected.loss, rtol=1e-12, atol=0)
    assert loss.requires_grad == (grad_enabled and (x_wants or weight_wants))
    if not loss.requires_grad:
        return
    with Products() as in_backward:
        (loss * FACTOR).backward()
    assert in_backward.count == 0
    for wants, tensor, gradient in ((x_wants, x, expected.grad_x), (weight_wants, weight, expected.grad_weight)):
        assert (tensor.grad is not None) == wants
        if wants:
            torch.testing.assert_close(tensor.grad, gradient, rtol=1e-12, atol=1e-12)


class AtOnce:
    """A loss that turns the logits into their gradient by itself, as a GPU's kernel does, and only where it is wanted.

    wanted: for every chunk, whether it was.
    """

    def __init__(self) -> None:
        self.wanted: list[bool] = []

    def losses(
        self, logits: Tensor, labels: Labels, communicator: Communicator, *, wants_gradient: bool = True
    ) -> tuple[Tensor, Callable[[], None]]:
        self.wanted.append(wants_gradient)
        found, differentiate = IN_PLACE.losses(logits, labels, communicator)
        if wants_gradient:
            differentiate()
        return found, lambda: None


@each(("x_wants", "weight_wants", "grad_enabled"), [(True, False, True), (False, True, True), (True, True, False)])
def test_a_loss_with_its_gradient_at_once(x_wants: bool, weight_wants: bool, grad_enabled: bool) -> None:
    """It is asked for the gradient exactly where one of the two inputs needs it."""
    case, expected = draw(13), plain(draw(13))
    x, weight = case.x.clone().requires_grad_(x_wants), case.matrix.clone().requires_grad_(weight_wants)
    targets = Targets(case.labels, case.token_weights, 13, 3 * 13 * 8)
    softmax = AtOnce()
    with torch.set_grad_enabled(grad_enabled):
        loss = summed_cross_entropy(x, weight, targets, Border(ALONE), softmax=softmax)
    torch.testing.assert_close(loss.detach(), expected.loss, rtol=1e-12, atol=0)
    assert softmax.wanted == [grad_enabled] * 4
    if not grad_enabled:
        return
    (loss * FACTOR).backward()
    for wants, tensor, gradient in ((x_wants, x, expected.grad_x), (weight_wants, weight, expected.grad_weight)):
        if wants:
            torch.testing.assert_close(tensor.grad, gradient, rtol=1e-12, atol=1e-12)


# --- the gradient's slot ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_micro_batches_add_their_gradients_up_in_a_slot(dtype: torch.dtype, rtol: float) -> None:
    """The first micro-batch overwrites what lies in the slot, the others add; autograd gets no gradient."""
    micro_batches = [draw(13, tokens=tokens) for tokens in (TOKENS, 5, 8)]
    weight = nn.Parameter(micro_batches[0].matrix.clone())
    slot = torch.full_like(weight, torch.nan, dtype=dtype, requires_grad=False)
    calls = iter(range(len(micro_batches)))
    attach_gradient_slot(weight, lambda: GradientSlot(slot, is_first=next(calls) == 0))
    expected = torch.zeros_like(slot, dtype=torch.float64)
    for case in micro_batches:
        case = case._replace(matrix=weight.detach())
        targets = Targets(case.labels, case.token_weights, 13, 3 * 13 * 8)
        (summed_cross_entropy(case.x, weight, targets, Border(ALONE)) * FACTOR).backward()
        expected += plain(case).grad_weight
        torch.testing.assert_close(slot.double(), expected, rtol=rtol, atol=rtol * float(expected.abs().max()))
    assert weight.grad is None and next(calls, None) is None


def test_a_second_backward_is_refused() -> None:
    case = draw(5)
    x = case.x.clone().requires_grad_(True)
    loss = summed_cross_entropy(x, case.matrix, Targets(case.labels, None, 5, 100), Border(ALONE))
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="a second backward"):
        loss.backward()


# --- lower precision --------------------------------------------------------------------------------------------------


def relative(measured: Tensor, exact: Tensor) -> float:
    return float((measured.double() - exact).norm() / exact.norm())


def mild(vocab_size: int, tokens: int, hidden: int, dtype: torch.dtype) -> Case:
    """Draw inputs whose logits are of order 1 and whose values `dtype` holds exactly."""
    case = draw(vocab_size, tokens=tokens, hidden=hidden)
    return case._replace(x=(case.x / 40).to(dtype), matrix=(case.matrix / 12).to(dtype))


def test_float32() -> None:
    case = mild(500, 200, 16, torch.float32)
    x, weight = case.x.clone().requires_grad_(True), case.matrix.clone().requires_grad_(True)
    loss = summed_cross_entropy(x, weight, Targets(case.labels, case.token_weights, 500, 7 * 500 * 4), Border(ALONE))
    (loss * FACTOR).backward()
    expected = plain(case)
    assert loss.dtype == torch.float32 and x.grad is not None and weight.grad is not None
    assert relative(loss.detach(), expected.loss) < 1e-6
    assert relative(x.grad, expected.grad_x) < 1e-6
    assert relative(weight.grad, expected.grad_weight) < 1e-6


# bf16 has 8 significant bits, so that its largest relative rounding error is 2^-9.
HALF_ULP = 2.0**-9


def test_bfloat16_sums_the_weights_gradient_in_float32() -> None:
    """The gradient of 256 chunks is as precise as if rounded once; sums in bf16 would not be."""
    case = mild(40, 1024, 24, torch.bfloat16)
    expected = plain(case)
    x, weight = case.x.clone().requires_grad_(True), nn.Parameter(case.matrix.clone())
    weight.grad_dtype = torch.float32
    loss = summed_cross_entropy(x, weight, Targets(case.labels, case.token_weights, 40, 4 * 40 * 4), Border(ALONE))
    (loss * FACTOR).backward()
    assert loss.dtype == torch.float32 and x.grad is not None and weight.grad is not None
    assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
    bound = 2 * HALF_ULP
    assert relative(loss.detach(), expected.loss) < bound
    assert relative(x.grad, expected.grad_x) < 2 * bound  # rounded: logits, their gradient, product, result
    assert relative(weight.grad, expected.grad_weight) < bound
    rounded = torch.zeros_like(weight)
    for start in range(0, 1024, 4):
        part = Case(*(tensor[start : start + 4] if tensor is not case.matrix else tensor for tensor in case))
        rounded += plain(part).grad_weight.bfloat16()
    assert relative(rounded, expected.grad_weight) > 2 * bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_parameter_whose_gradient_has_its_own_precision(dtype: torch.dtype) -> None:
    case = mild(40, 64, 24, dtype)
    expected = plain(case)
    x, weight = case.x.clone().requires_grad_(True), nn.Parameter(case.matrix.clone())
    loss = summed_cross_entropy(x, weight, Targets(case.labels, case.token_weights, 40, 1000), Border(ALONE))
    (loss * FACTOR).backward()
    assert x.grad is not None and weight.grad is not None
    assert x.grad.dtype == weight.grad.dtype == dtype
    precision = HALF_ULP if dtype == torch.bfloat16 else HALF_ULP / 8
    assert relative(x.grad, expected.grad_x) < 4 * precision
    assert relative(weight.grad, expected.grad_weight) < 2 * precision


def test_the_factor_is_not_rounded_to_the_gradients_precision() -> None:
    case = mild(40, 64, 24, torch.bfloat16)
    found = []
    for factor in (1.0, 1 + 2**-9 + 2**-10):
        x = case.x.clone().requires_grad_(True)
        loss = summed_cross_entropy(x, case.matrix, Targets(case.labels, None, 40, 1000), Border(ALONE))
        (loss * factor).backward()
        assert x.grad is not None
        found.append(x.grad.double())
    torch.testing.assert_close(found[1], (found[0] * factor).bfloat16().double(), rtol=0, atol=0)
    assert not torch.equal(found[0], found[1])


# --- memory -----------------------------------------------------------------------------------------------------------

VOCABULARY, WIDTH, ROWS = 4096, 16, 8


def peak_bytes(tokens: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes alive at the peak and between forward and backward, both beyond those alive before."""
    case = mild(VOCABULARY, tokens, WIDTH, dtype)
    x, weight = case.x.clone().requires_grad_(True), case.matrix.clone().requires_grad_(True)
    targets = Targets(case.labels, case.token_weights, VOCABULARY, ROWS * VOCABULARY * 4)
    there = (x, weight, case.labels, targets.token_weights)
    with Ledger(torch.device("cpu")) as ledger:
        for tensor in there:
            assert tensor is not None
            ledger.tag(tensor, "parameters")
        ledger.reset()
        before = sum(ledger.live_bytes().values())
        ledger.phase("forward")
        loss = summed_cross_entropy(x, weight, targets, Border(ALONE))
        ledger.phase("backward")
        left = sum(ledger.live_bytes().values()) - before
        loss.backward()
        return ledger.take().peak_bytes - before, left


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_memory_is_one_chunk_and_the_gradients_however_many_tokens(dtype: torch.dtype, itemsize: int) -> None:
    """Each further token adds only its row of x's gradient to the memory."""
    lower = itemsize if itemsize < 4 else 0  # bytes of a second copy in the lower precision
    gradient = VOCABULARY * WIDTH * (4 + lower)
    chunk = ROWS * VOCABULARY * (4 + lower)
    of_a_row = ROWS * 8 * 16  # labels, maxima and sums of a chunk
    few, left_of_few = peak_bytes(64, dtype)
    many, left_of_many = peak_bytes(8 * 64, dtype)
    token = WIDTH * itemsize
    assert chunk + gradient <= few <= chunk + gradient + 64 * token + of_a_row
    assert many - few == left_of_many - left_of_few == 7 * 64 * token
    assert left_of_few <= VOCABULARY * WIDTH * 4 + 64 * token + 64
    assert many < 8 * 64 * VOCABULARY * 4 / 8, "whole logits would take eight times as much and more"
