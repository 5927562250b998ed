"""Tests of quantized gathers and sums on real gloo ranks, bitwise against a reference that uses the codec alone."""

import random
from typing import Literal

import pytest
import torch
from support.node_axes import node_axes
from support.processes import run_ranks
from torch import Tensor

from megazero.comm.interface import LabelMismatch
from megazero.comm.local import LocalCommunicator
from megazero.comm.wires.codec import BlockCodec
from megazero.comm.wires.error_feedback import ErrorFeedback
from megazero.comm.wires.hops import Hops
from megazero.comm.wires.quantized import QuantizedGather, QuantizedReduceScatter
from megazero.comm.wires.two_hops import TwoHopCommunicator
from megazero.memory.lease import NO_SCRATCH

pytestmark = pytest.mark.gloo

SHAPES = ((2, 2), (1, 4), (4, 1), (3, 2), (2, 3))  # (nodes, ranks of a node)
NUMEL = 37  # elements of one rank's slice
INSIDE, ACROSS, WEIGHTS = BlockCodec(8, 16), BlockCodec(4, 8), BlockCodec(8, 16)


def drawn(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def rounded(codec: BlockCodec, row: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a row encoded and decoded."""
    encoded, decoded = torch.empty(codec.encoded_bytes(len(row)), dtype=torch.uint8), torch.empty(len(row), dtype=dtype)
    codec.encode(row, encoded)
    codec.decode(encoded, decoded)
    return decoded


def gather(rank: int, num_nodes: int, per_node: int, dtype: torch.dtype, seed: int | None) -> list[Tensor]:
    """Gather weights over one hop, in place over two hops, twice by one call, and whole numbers."""
    axes, size = node_axes(rank, num_nodes, per_node, seed=seed), num_nodes * per_node
    two = TwoHopCommunicator(axes.inside, axes.across, axes.whole, axes.pool)
    outputs = [torch.full((size * NUMEL,), -99, dtype=dtype) for _ in range(2)]
    mine = outputs[1][rank * NUMEL : (rank + 1) * NUMEL].copy_(drawn(rank, NUMEL, dtype))
    works = [
        QuantizedGather(axes.whole, WEIGHTS, axes.pool).all_gather_into(outputs[0], drawn(rank, NUMEL, dtype), 5),
        QuantizedGather(two, WEIGHTS, axes.pool).all_gather_into(outputs[1], mine),
    ]
    for work in reversed(works):
        work.wait()
    sent = axes.meter.bytes_by_axis()
    assert sent["whole"] == {"all_gather": (size - 1) * WEIGHTS.encoded_bytes(NUMEL)}
    assert sum(sent.get("across", {}).values()) == (num_nodes - 1) * WEIGHTS.encoded_bytes(NUMEL)
    ranks = torch.empty(size, dtype=torch.int64)
    QuantizedGather(two, WEIGHTS, axes.pool).all_gather_into(ranks, torch.tensor([rank])).wait()
    assert ranks.tolist() == list(range(size))
    several = [torch.full((size * NUMEL,), -99, dtype=dtype) for _ in range(2)]
    both = QuantizedGather(two, WEIGHTS, axes.pool).all_gather_coalesced(several, [drawn(rank, NUMEL, dtype)] * 2, 3)
    both.wait()
    outputs += several
    before, apart = axes.meter.count("whole", "all_gather").calls, [torch.empty_like(one) for one in several]
    QuantizedGather(axes.whole, WEIGHTS, axes.pool).all_gather_coalesced(apart, [drawn(rank, NUMEL, dtype)] * 2).wait()
    assert axes.meter.count("whole", "all_gather").calls == before + 1, "one message of both"
    outputs += apart
    axes.check_finished()
    return outputs


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(("num_nodes", "per_node"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gathers(num_nodes: int, per_node: int, dtype: torch.dtype, seed: int | None) -> None:
    size = num_nodes * per_node
    exact = torch.cat([drawn(rank, NUMEL, dtype) for rank in range(size)])
    expected = torch.cat([rounded(WEIGHTS, drawn(rank, NUMEL, dtype), dtype) for rank in range(size)])
    assert not torch.equal(expected, exact), "the example distinguishes nothing"
    for outputs in run_ranks(size, gather, num_nodes, per_node, dtype, seed):
        assert all(torch.equal(output, expected) for output in outputs)


def expected_sums(inputs: list[Tensor], num_nodes: int, per_node: int) -> list[Tensor]:
    """Return what each rank's output of a quantized reduce-scatter of these inputs is."""
    dtype = torch.float64 if inputs[0].dtype is torch.float64 else torch.float32
    places = torch.stack(inputs).view(num_nodes, per_node, num_nodes, per_node, -1)  # [from node, rank; to node, rank]
    outputs = []
    for node in range(num_nodes):
        for rank in range(per_node):
            total: Tensor | None = None
            for source in range(num_nodes):
                parts = places[source, :, node, rank]
                of_node = parts[0].to(dtype)
                if per_node > 1:
                    of_node = rounded(INSIDE, parts[0], dtype)
                    for part in parts[1:]:
                        of_node += rounded(INSIDE, part, dtype)
                if num_nodes > 1:
                    of_node = rounded(ACROSS, of_node, dtype)
                total = of_node if total is None else total + of_node
            assert total is not None
            outputs.append(total.to(inputs[0].dtype))
    return outputs


def reduce(rank: int, num_nodes: int, per_node: int, dtype: torch.dtype, seed: int | None) -> list[Tensor]:
    """Return the sums of three calls under way at once, beside gathers, waited for in an order of this rank's own."""
    axes, size = node_axes(rank, num_nodes, per_node, seed=seed), num_nodes * per_node
    hops = Hops()
    two = TwoHopCommunicator(axes.inside, axes.across, axes.whole, axes.pool, hops=hops)
    axis = QuantizedReduceScatter(axes.inside, axes.across, two, INSIDE, ACROSS, axes.pool, hops=hops)
    gathered, works, outputs = torch.empty(size), [], []
    for call in range(3):
        whole = drawn(rank + 10 * call, size * NUMEL, dtype)
        output = whole[rank * NUMEL : (rank + 1) * NUMEL] if call == 1 else torch.empty(NUMEL, dtype=dtype)
        outputs.append(output)
        works.append(axis.reduce_scatter_into(output, whole))
        if call == 1:
            works.append(axis.all_gather_into(gathered, torch.ones(1)))
    random.Random(rank).shuffle(works)
    for work in works:
        work.wait()
    assert gathered.tolist() == [1.0] * size
    sent = {name: axes.meter.count(name, "all_to_all").nbytes for name in ("inside", "across")}
    inside, across = ((per_node - 1) * num_nodes * INSIDE.encoded_bytes(NUMEL), ACROSS.encoded_bytes(NUMEL))
    assert sent == {"inside": 3 * inside, "across": 3 * (num_nodes - 1) * across}
    axes.check_finished()
    return [output.clone() for output in outputs]


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(("num_nodes", "per_node"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_sums(num_nodes: int, per_node: int, dtype: torch.dtype, seed: int | None) -> None:
    size = num_nodes * per_node
    found = run_ranks(size, reduce, num_nodes, per_node, dtype, seed)
    for call in range(3):
        inputs = [drawn(rank + 10 * call, size * NUMEL, dtype) for rank in range(size)]
        exact = torch.stack(inputs).double().sum(0).view(size, NUMEL)
        for rank, expected in enumerate(expected_sums(inputs, num_nodes, per_node)):
            assert torch.equal(found[rank][call], expected)
            assert 0 < (expected.double() - exact[rank]).abs().max() < 0.2 * size, "near the sum, but not the sum"


def together(rank: int, num_nodes: int, per_node: int) -> list[tuple[Tensor, list[int], list[int]]]:
    """Sum three tensors twice, by one call and by a call for each; return the last sums, and calls and bytes by hop."""
    size, numels, found = num_nodes * per_node, (NUMEL, 1, 33), []
    for is_one_call in (True, False):
        axes = node_axes(rank, num_nodes, per_node)
        feedback = ErrorFeedback(0.5, 10**9, axes.pool.keep)
        axis = QuantizedReduceScatter(
            axes.inside, axes.across, axes.whole, INSIDE, ACROSS, axes.pool, feedback=feedback
        )
        outputs = [torch.empty(numel) for numel in numels]
        for call in range(2):
            inputs = [drawn(rank + 10 * call, size * numel) for numel in numels]
            if is_one_call:
                axis.reduce_scatter_coalesced(outputs, inputs, (3, 4, 9)).wait()
            else:
                for output, input, key in zip(outputs, inputs, (3, 4, 9), strict=True):
                    axis.reduce_scatter_into(output, input, key).wait()
        counts = [axes.meter.count(name, "all_to_all") for name in ("inside", "across")]
        found.append((torch.cat(outputs), [count.calls for count in counts], [count.nbytes for count in counts]))
        axes.check_finished()
    return found


@pytest.mark.parametrize(("num_nodes", "per_node"), [(2, 2), (1, 2)])
def test_several_tensors_are_summed_by_one_exchange(num_nodes: int, per_node: int) -> None:
    for at_once, apart in run_ranks(num_nodes * per_node, together, num_nodes, per_node):
        assert torch.equal(at_once[0], apart[0]) and at_once[2] == apart[2]
        assert [3 * calls for calls in at_once[1]] == apart[1] and at_once[1][0] == 2


def overflow(rank: int, bad: float) -> list[bool]:
    """Sum numbers of which one on rank 1 is not finite; return which are finite."""
    axes = node_axes(rank, 2, 2)
    axis = QuantizedReduceScatter(axes.inside, axes.across, axes.whole, INSIDE, ACROSS, axes.pool)
    whole, output = torch.ones(4 * 32), torch.empty(32)
    if rank == 1:
        whole[2 * 32 + 20] = bad  # in rank 2's slice
    axis.reduce_scatter_into(output, whole).wait()
    return output.isfinite().tolist()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    found = run_ranks(4, overflow, bad)
    assert [all(found[rank]) for rank in (0, 1, 3)] == [True] * 3
    assert found[2] == [True] * 16 + [False] * 16, "its block inside, of 16"


def many_sums(rank: int, num_calls: int, is_fed_back: bool) -> tuple[Tensor, Tensor, int]:
    """Sum the same numbers many times; return the sum of sums, the exact one, and the bytes of errors."""
    axes = node_axes(rank, 2, 2)
    feedback = ErrorFeedback(0.5, 10**9, axes.pool.keep) if is_fed_back else None
    codec = BlockCodec(4, 16)
    axis = QuantizedReduceScatter(axes.inside, axes.across, axes.whole, codec, codec, axes.pool, feedback=feedback)
    total, output = torch.zeros(NUMEL), torch.empty(NUMEL)
    for _ in range(num_calls):
        axis.reduce_scatter_into(output, drawn(rank, 4 * NUMEL), key=3).wait()
        total += output
    exact = sum((drawn(other, 4 * NUMEL) for other in range(4)), torch.zeros(4 * NUMEL)).view(4, NUMEL)[rank]
    return total, exact * num_calls, 0 if feedback is None else feedback.nbytes


def test_errors_are_fed_back() -> None:
    for total, exact, nbytes in run_ranks(4, many_sums, 100, True):
        assert (total - exact).abs().max() < 6, "a few scales, whatever the number of calls"
        row = 40 + 4
        assert nbytes == 4 * row + 2 * row, "of two rows of two inside, and two across"
    assert all((total - exact).abs().max() > 30 for total, exact, _ in run_ranks(4, many_sums, 100, False))


def stochastic(rank: int, seed: int) -> Tensor:
    axes = node_axes(rank, 2, 2)
    generator, codec = torch.Generator().manual_seed(seed + rank), BlockCodec(4, 16, stochastic=True)
    axis = QuantizedReduceScatter(axes.inside, axes.across, axes.whole, codec, codec, axes.pool, generator=generator)
    output = torch.empty(NUMEL)
    axis.reduce_scatter_into(output, drawn(rank, 4 * NUMEL)).wait()
    gathered = torch.empty(4 * NUMEL)
    QuantizedGather(axes.whole, codec, axes.pool, generator=generator).all_gather_into(gathered, output).wait()
    return gathered


def test_rounding_at_random_is_that_of_the_generator() -> None:
    found = run_ranks(4, stochastic, 5)
    assert all(torch.equal(each, found[0]) for each in found), "every rank decodes the same"
    assert torch.equal(found[0], run_ranks(4, stochastic, 5)[0])
    assert not torch.equal(found[0], run_ranks(4, stochastic, 6)[0])


def mislabelled(rank: int) -> str:
    axes = node_axes(rank, 1, 2, is_late=False)
    axis = QuantizedGather(axes.whole, WEIGHTS, axes.pool)
    work = axis.all_gather_into(torch.empty(2 * NUMEL), torch.ones(NUMEL), rank)
    try:
        work.wait()
    except LabelMismatch as error:
        return f"{error.rank}: {error.label}"
    finally:
        axes.whole.barrier()  # until then messages may be on their way
    return ""


def test_labels_are_compared() -> None:
    assert run_ranks(2, mislabelled) == ["1: 1", "0: 0"]


@pytest.mark.parametrize("bits", [8, 4])
def test_an_axis_of_one_rank_rounds_nothing(bits: Literal[8, 4]) -> None:
    alone, codec, given = LocalCommunicator(), BlockCodec(bits, 2), drawn(0, NUMEL)
    gathering = QuantizedGather(alone, codec, NO_SCRATCH)
    summing = QuantizedReduceScatter(alone, alone, alone, codec, codec, NO_SCRATCH)
    for collective in (gathering.all_gather_into, summing.reduce_scatter_into):
        output = torch.empty(NUMEL)
        collective(output, given).wait()
        assert torch.equal(output, given)
