"""Tests of an axis over several nodes on real gloo ranks: results, the order of sums and of hops, and bytes sent."""

import random
from typing import Any

import pytest
import torch
from support.node_axes import NodeAxes, node_axes
from support.processes import run_ranks
from torch import Tensor

from megazero.comm.interface import LabelMismatch, ReduceKind, Work
from megazero.comm.local import LocalCommunicator
from megazero.comm.wires.two_hops import TwoHopCommunicator
from megazero.memory.lease import NO_SCRATCH

pytestmark = pytest.mark.gloo

SHAPES = ((2, 2), (1, 4), (4, 1), (3, 2), (2, 3))  # (nodes, ranks of a node)
NUMEL = 5  # elements of one rank's slice, odd so that nothing divides evenly by accident


def two_hops(axes: NodeAxes) -> TwoHopCommunicator:
    return TwoHopCommunicator(axes.inside, axes.across, axes.whole, axes.pool)


def whole_numbers(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return small whole numbers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(-8, 9, (numel,), generator=generator).to(dtype)


def drawn(rank: int, numel: int) -> Tensor:
    """Return numbers whose sums depend on their order."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def everything(rank: int, num_nodes: int, per_node: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the results of all collectives on one rank."""
    axes = node_axes(rank, num_nodes, per_node)
    axis, size = two_hops(axes), num_nodes * per_node
    assert (axis.rank, axis.size) == (rank, size)
    mine = slice(rank * NUMEL, (rank + 1) * NUMEL)
    short, long = whole_numbers(rank, NUMEL, dtype), whole_numbers(rank, size * NUMEL, dtype)
    found = {}

    found["gather"] = torch.empty_like(long)
    axis.all_gather_into(found["gather"], short).wait()
    found["gather in place"] = torch.full_like(long, -99)
    found["gather in place"][mine] = short
    axis.all_gather_into(found["gather in place"], found["gather in place"][mine], 3).wait()
    several = [torch.empty_like(long), long.new_empty(size)]
    axis.all_gather_coalesced(several, [short, short[:1]], 4).wait()
    found["gather of several"], found["its second"] = several
    found["scatter"] = torch.empty_like(short)
    axis.reduce_scatter_into(found["scatter"], long).wait()
    assert torch.equal(long, whole_numbers(rank, size * NUMEL, dtype)), "a reduce-scatter leaves its input"
    found["scatter in place"] = long.clone()
    axis.reduce_scatter_into(found["scatter in place"][mine], found["scatter in place"], 7).wait()
    of_both = [torch.empty_like(short), short.new_empty(1)]
    axis.reduce_scatter_coalesced(of_both, [long, long[:size]]).wait()
    found["scatter of several"], found["the other sum"] = of_both
    found["exchange"] = torch.empty_like(long)
    axis.all_to_all_into(found["exchange"], long).wait()
    kinds: tuple[ReduceKind, ...] = ("sum", "max", "min")
    for kind in kinds:
        for name, source in (("slices", long), ("odd", short), ("scalars", short)):
            reduced = found[f"{name} {kind}"] = source.clone()
            (axis.all_reduce_scalars if name == "scalars" else axis.all_reduce)(reduced, kind).wait()
    found["broadcast"] = short.clone()
    axis.broadcast(found["broadcast"], size - 1).wait()
    axis.barrier()
    if rank == 0:
        axis.send(short, size - 1).wait()
    elif rank == size - 1:
        found["message"] = torch.empty_like(short)
        axis.receive_into(found["message"], 0).wait()
    axes.check_finished()
    return found


@pytest.mark.parametrize(("num_nodes", "per_node"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_every_collective_has_the_results_of_one_hop(num_nodes: int, per_node: int, dtype: torch.dtype) -> None:
    size = num_nodes * per_node
    short = torch.stack([whole_numbers(rank, NUMEL, dtype) for rank in range(size)])
    long = torch.stack([whole_numbers(rank, size * NUMEL, dtype) for rank in range(size)])
    for rank, found in enumerate(run_ranks(size, everything, num_nodes, per_node, dtype)):
        mine = slice(rank * NUMEL, (rank + 1) * NUMEL)
        in_place = long[rank].clone()
        in_place[mine] = long.sum(0)[mine]
        expected = {
            "gather": short.flatten(),
            "gather in place": short.flatten(),
            "gather of several": short.flatten(),
            "its second": short[:, 0],
            "scatter": long.sum(0)[mine],
            "scatter in place": in_place,
            "scatter of several": long.sum(0)[mine],
            "the other sum": long.sum(0)[rank : rank + 1],
            "exchange": long.view(size, size, NUMEL)[:, rank].flatten(),
            "broadcast": short[size - 1],
        }
        for name, source in (("slices", long), ("odd", short), ("scalars", short)):
            expected |= {
                f"{name} sum": source.sum(0),
                f"{name} max": source.amax(0),
                f"{name} min": source.amin(0),
            }
        if rank == size - 1:
            expected["message"] = short[0]
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


def sums(rank: int, num_nodes: int, per_node: int) -> tuple[Tensor, Tensor]:
    """Return a reduce-scatter's and an all-reduce's sums of numbers whose order matters."""
    axes = node_axes(rank, num_nodes, per_node)
    axis, size = two_hops(axes), num_nodes * per_node
    scattered, reduced = torch.empty(NUMEL, dtype=torch.float64), drawn(rank, size * NUMEL)
    axis.reduce_scatter_into(scattered, drawn(rank, size * NUMEL)).wait()
    axis.all_reduce(reduced).wait()
    axes.check_finished()
    return scattered, reduced


@pytest.mark.parametrize(("num_nodes", "per_node"), [(2, 2), (3, 2), (2, 3)])
def test_a_node_is_summed_first(num_nodes: int, per_node: int) -> None:
    size = num_nodes * per_node
    contributions = torch.stack([drawn(rank, size * NUMEL) for rank in range(size)])
    of_nodes = torch.stack([node.sum(0) for node in contributions.view(num_nodes, per_node, -1)])
    expected = of_nodes.sum(0)
    across_first = contributions.view(num_nodes, per_node, -1).transpose(0, 1).sum(1).sum(0)
    assert not torch.equal(expected, across_first), "the example distinguishes nothing"
    found = run_ranks(size, sums, num_nodes, per_node)
    for rank, (scattered, reduced) in enumerate(found):
        assert torch.equal(scattered, expected[rank * NUMEL : (rank + 1) * NUMEL])
        assert torch.equal(reduced, found[0][1]), "one result on all ranks"
        torch.testing.assert_close(reduced, expected, rtol=1e-14, atol=1e-14)  # gloo's all-reduce has its own order
        assert num_nodes > 2 or torch.equal(reduced, expected), "there are no two orders of two nodes"


CALLS = ("scatter", "gather", "gather", "reduce", "scatter", "largest", "gather", "odd", "scatter", "scatter")
LENGTHS = (1, 6, 501)


def call(axis: TwoHopCommunicator, turn: int, numel: int) -> tuple[Tensor, Work]:
    """Begin one call and return its output and its work; element i of rank r's input is i * (r + 1) + turn."""
    name, size = CALLS[turn], axis.size
    long = torch.arange(numel * size, dtype=torch.float64) * (axis.rank + 1) + turn
    if name == "scatter":
        output = torch.empty(numel, dtype=torch.float64)
        return output, axis.reduce_scatter_into(output, long)
    if name == "gather":
        output = torch.empty_like(long)
        return output, axis.all_gather_into(output, long[:numel], turn)
    output = long[:numel].clone() if name == "odd" else long
    return output, axis.all_reduce(output, "max" if name == "largest" else "sum")


def expected_of(turn: int, numel: int, rank: int, size: int) -> Tensor:
    place = torch.arange(numel * size, dtype=torch.float64)
    everyone = torch.stack([place * (other + 1) + turn for other in range(size)])
    return {
        "scatter": everyone.sum(0)[rank * numel : (rank + 1) * numel],
        "gather": everyone[:, :numel].reshape(-1),
        "reduce": everyone.sum(0),
        "largest": everyone.amax(0),
        "odd": everyone[:, :numel].sum(0),
    }[CALLS[turn]]


def all_in_flight(rank: int, num_nodes: int, per_node: int, is_late: bool) -> list[str]:
    """Have many calls under way at once, waited for in an order of this rank's own, some of them before others begin.

    Returns those whose results are wrong.
    """
    size, wrong = num_nodes * per_node, []
    for repetition in range(6):
        axes = node_axes(rank, num_nodes, per_node, is_late=is_late, seed=repetition or None)
        axis, order = two_hops(axes), random.Random(10 * rank + repetition)
        lengths = [LENGTHS[(turn + repetition) % len(LENGTHS)] for turn in range(len(CALLS))]
        begun: dict[int, tuple[Tensor, Work]] = {}
        for turn in [*range(len(CALLS)), *([None] * len(CALLS))]:
            if turn is not None:
                begun[turn] = call(axis, turn, lengths[turn])
            if turn is None or order.random() < 0.3:
                chosen = order.choice(sorted(begun)) if begun else None
                if chosen is not None:
                    output, work = begun.pop(chosen)
                    work.wait()
                    if 1 not in (num_nodes, per_node):
                        work.wait()  # a second time, which works of two hops allow
                    if not torch.equal(output, expected_of(chosen, lengths[chosen], rank, size)):
                        wrong.append(f"{CALLS[chosen]} {chosen} of {lengths[chosen]} in repetition {repetition}")
        assert not begun
        axes.check_finished()
    return wrong


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize(("num_nodes", "per_node"), SHAPES)
def test_calls_are_under_way_at_once_and_waited_for_in_any_order(num_nodes: int, per_node: int, is_late: bool) -> None:
    size = num_nodes * per_node
    assert run_ranks(size, all_in_flight, num_nodes, per_node, is_late) == [[]] * size


def progress(rank: int) -> dict[str, list[int]]:
    """Return how many collectives have begun across nodes after each of some steps."""
    axes = node_axes(rank, 2, 2)
    axis, found = two_hops(axes), {}

    def begun(name: Any) -> list[int]:
        return [axes.meter.count(of, name).calls for of in ("inside", "across")]

    long, outputs = torch.ones(4 * NUMEL), [torch.empty(NUMEL) for _ in range(3)]
    first = axis.reduce_scatter_into(outputs[0], long)
    found["a reduction"] = begun("reduce_scatter")
    second = axis.reduce_scatter_into(outputs[1], long)
    found["another"] = begun("reduce_scatter")
    first.wait()
    found["the first's wait"] = begun("reduce_scatter")
    gathered = [torch.empty(4 * NUMEL) for _ in range(3)]
    works = [axis.all_gather_into(each, torch.ones(NUMEL)) for each in gathered]
    found["gathers behind it"] = [*begun("reduce_scatter"), *begun("all_gather")]
    works[1].wait()
    found["the second gather's wait"] = begun("all_gather")
    third = axis.reduce_scatter_into(outputs[2], long)
    found["a reduction behind gathers"] = begun("all_gather")
    for work in (second, third, works[2], works[0]):
        work.wait()
    axes.check_finished()
    return found


def test_slow_hops_begin_before_somebody_waits() -> None:
    """A reduction of two nodes takes one call inside and one across, and so does a gather."""
    expected = {
        "a reduction": [1, 0],
        "another": [2, 1],
        "the first's wait": [2, 1],
        "gathers behind it": [2, 2, 0, 3],
        "the second gather's wait": [2, 3],
        "a reduction behind gathers": [3, 3],
    }
    assert run_ranks(4, progress) == [expected] * 4


def several_gathers(rank: int, num_nodes: int, per_node: int, room: int) -> list[list[int]]:
    """Gather tensors by one call, with buffers of `room` bytes; return calls and bytes across nodes and inside."""
    axes = node_axes(rank, num_nodes, per_node)
    axes.pool.resize(room)
    size = num_nodes * per_node
    inputs = [torch.full((numel,), rank + numel / 10, dtype=torch.float64) for numel in (3, 5, 1 << 15, 7)]
    outputs = [input.new_empty(size, len(input)) for input in inputs]
    two_hops(axes).all_gather_coalesced([output.view(-1) for output in outputs], inputs, 4).wait()
    for output, input in zip(outputs, inputs, strict=True):
        expected = torch.arange(size, dtype=torch.float64) - rank + input[0]
        torch.testing.assert_close(output, expected[:, None].expand_as(output))
    axes.check_finished()
    counts = [axes.meter.count(axis, "all_gather") for axis in ("across", "inside")]
    return [[count.calls, count.nbytes] for count in counts]


@pytest.mark.parametrize(("num_nodes", "per_node"), [(2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize(("room", "calls"), [(3 + 5 + (1 << 15), 2), (7 + (1 << 15), 3)])
def test_small_gathers_share_the_calls_of_both_hops(num_nodes: int, per_node: int, room: int, calls: int) -> None:
    """Three tensors make a slice of 256 KiB, if a buffer has room for them; the last one begins behind it."""
    n, size = 8 * (3 + 5 + (1 << 15) + 7), num_nodes * per_node
    expected = [[calls, (num_nodes - 1) * n], [calls, num_nodes * (per_node - 1) * n]]
    assert run_ranks(size, several_gathers, num_nodes, per_node, 8 * num_nodes * room) == [expected] * size


def traffic(rank: int, num_nodes: int, per_node: int) -> dict[str, dict[str, int]]:
    axes = node_axes(rank, num_nodes, per_node)
    axis, size = two_hops(axes), num_nodes * per_node
    long, short = torch.ones(size * 6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    axis.all_gather_into(long, short).wait()
    axis.reduce_scatter_into(short, long).wait()
    axis.all_reduce(long).wait()
    return axes.meter.bytes_by_axis()


@pytest.mark.parametrize(("num_nodes", "per_node"), [(2, 2), (3, 2), (2, 3)])
def test_every_byte_crosses_once_per_node(num_nodes: int, per_node: int) -> None:
    """A, I and n as in `two_hops.py`, in bytes; an all-reduce's slices are those of a node: A n."""
    n = 6 * 8
    across, inside = (num_nodes - 1) * n, num_nodes * (per_node - 1) * n
    expected = {
        "across": {"all_gather": across, "reduce_scatter": across, "all_reduce": 2 * across},
        "inside": {"all_gather": 2 * inside, "reduce_scatter": 2 * inside},
    }
    assert run_ranks(num_nodes * per_node, traffic, num_nodes, per_node) == [expected] * (num_nodes * per_node)


def with_labels(rank: int, num_nodes: int, per_node: int, others: tuple[int, ...]) -> str:
    """Gather under one label, and under another on the ranks `others`; return the error in words."""
    axes = node_axes(rank, num_nodes, per_node, is_late=False)
    axis = two_hops(axes)
    gathered = torch.empty(num_nodes * per_node * NUMEL)
    work = axis.all_gather_into(gathered, torch.full((NUMEL,), float(rank)), 9 if rank in others else 8)
    try:
        work.wait()
    except LabelMismatch as error:
        return f"{error.rank}: {error.label}"
    finally:
        axes.whole.barrier()  # until then messages may be on their way
    return ""


@pytest.mark.parametrize(
    ("num_nodes", "per_node", "others", "expected"),
    [
        # Rank 3's neighbour across is 1, and those inside 2.
        (2, 2, (3,), ["", "3: 9", "3: 9", "1: 8"]),
        # The whole column differs, so no rank sees it across; inside, every rank does.
        (2, 2, (1, 3), ["1: 9", "0: 8", "3: 9", "2: 8"]),
        # A whole node differs, which is seen across alone.
        (2, 2, (0, 1), ["2: 8", "3: 8", "0: 9", "1: 9"]),
        (2, 2, (), [""] * 4),
        (1, 4, (2,), ["", "", "1: 8", "2: 9"]),
    ],
)
def test_ranks_that_gather_something_else_are_named(
    num_nodes: int, per_node: int, others: tuple[int, ...], expected: list[str]
) -> None:
    assert run_ranks(num_nodes * per_node, with_labels, num_nodes, per_node, others) == expected


def test_an_axis_of_one_rank() -> None:
    alone = LocalCommunicator()
    axis = TwoHopCommunicator(alone, alone, alone, NO_SCRATCH)
    assert (axis.size, axis.rank) == (1, 0)
    given, output = torch.arange(3.0), torch.empty(3)
    for collective in (axis.all_gather_into, axis.reduce_scatter_into, axis.all_to_all_into):
        collective(output.fill_(-1), given).wait()
        assert output.tolist() == [0, 1, 2]
    for reduction in (axis.all_reduce, axis.all_reduce_scalars):
        reduction(given).wait()
    assert given.tolist() == [0, 1, 2]


def test_axes_that_do_not_fit_are_refused() -> None:
    class Pair(LocalCommunicator):
        size = 2

    with pytest.raises(AssertionError):
        TwoHopCommunicator(Pair(), LocalCommunicator(), LocalCommunicator(), NO_SCRATCH)
