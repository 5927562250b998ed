"""Tests that all communicators have the interface's methods with the same arguments, and how calls are grouped."""

import inspect

import torch
from support.each import each

from megazero.comm.interface import Communicator, CompletedWork, in_runs
from megazero.comm.local import LocalCommunicator
from megazero.comm.metered import MeteredCommunicator
from megazero.comm.process_group import ProcessGroupCommunicator
from megazero.comm.wires.forwarding import ForwardingCommunicator
from megazero.comm.wires.quantized import QuantizedGather, QuantizedReduceScatter
from megazero.comm.wires.two_hops import TwoHopCommunicator

CALLS = {name: inspect.signature(call) for name, call in inspect.getmembers(Communicator, inspect.isfunction)}
METHODS = (
    *("all_gather_into", "reduce_scatter_into", "all_to_all_into", "all_reduce", "all_reduce_scalars"),
    *("broadcast", "barrier", "send", "receive_into", "all_gather_coalesced", "reduce_scatter_coalesced"),
)
KINDS = (
    *(LocalCommunicator, ProcessGroupCommunicator, MeteredCommunicator),
    *(ForwardingCommunicator, TwoHopCommunicator, QuantizedGather, QuantizedReduceScatter),
)


def test_the_interface_has_these_methods() -> None:
    assert {name for name in CALLS if not name.startswith("_")} == set(METHODS)


@each("kind", KINDS)
@each("name", METHODS)
def test_every_communicator_takes_the_same_arguments(kind: type, name: str) -> None:
    assert inspect.signature(getattr(kind, name)) == CALLS[name]


def test_what_is_done_needs_no_waiting() -> None:
    done = CompletedWork()
    done.wait()
    done.wait()


@each(
    ("nbytes", "leased", "most", "expected"),
    [
        ([100] * 5, [400] * 5, 10_000, [5]),  # short ones by one call
        ([100] * 5, [400] * 5, 900, [2, 2, 1]),  # as far as a buffer has room for them
        ([100, 100, 100], [900, 400, 400], 900, [1, 2]),
        ([1 << 20, 1 << 20, 100, 100], [8, 8, 8, 8], 900, [1, 1, 2]),  # a long one ends its call
        ([100, 1 << 20, 100], [8, 8, 8], 900, [2, 1]),
        ([100], [2_000], 900, [1]),
    ],
)
def test_short_tensors_are_gathered_by_one_call(
    nbytes: list[int], leased: list[int], most: int, expected: list[int]
) -> None:
    runs = list(in_runs([torch.empty(number, dtype=torch.uint8) for number in nbytes], leased, most))
    assert [run.stop - run.start for run in runs] == expected
    assert [place for run in runs for place in range(run.start, run.stop)] == list(range(len(nbytes)))
