"""Runs `python -m megazero ...` as one of several ranks that share a GPU and communicate by host memory and gloo.

    RANK=... python benchmarks/shared_gpu.py cuda|cpu verify-layout FLAGS

NCCL refuses two ranks on one GPU, and gloo does not move a GPU's memory, so gloo is given copies here.  All that a
layout does to tensors on a GPU is real; only NCCL and its streams are not tested.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.__main__ import main as run
from megazero.comm import startup
from megazero.comm.interface import ReduceKind, Work, gather_in_turn, reduce_in_turn
from megazero.comm.process_group import ProcessGroupCommunicator
from megazero.console import run_program
from megazero.memory.lease import Scratch


class _Copied:
    """The work of a collective on copies; `wait` copies the result (source) to the device's tensor (target)."""

    def __init__(self, work: Work, target: Tensor, source: Tensor) -> None:
        self._work, self._target, self._source = work, target, source

    def wait(self) -> None:
        self._work.wait()
        self._target.copy_(self._source)


class OverHost(ProcessGroupCommunicator):
    """A communicator that copies every tensor to the host, has gloo send it, and copies the result back."""

    def __init__(self, group: dist.ProcessGroup, scratch: Scratch, **_: object) -> None:
        super().__init__(group, scratch)
        self._exchanges = False  # use gloo's own collectives, which need no memory of the device

    def all_gather_into(self, output: Tensor, input: Tensor, label: int | None = None) -> Work:
        gathered = torch.empty(output.shape, dtype=output.dtype)
        return _Copied(super().all_gather_into(gathered, input.cpu(), label), output, gathered)

    def all_gather_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], label: int | None = None
    ) -> Work:
        return gather_in_turn(self, outputs, inputs, label)

    def reduce_scatter_into(self, output: Tensor, input: Tensor, key: int | None = None) -> Work:
        reduced = torch.empty(output.shape, dtype=output.dtype)
        return _Copied(super().reduce_scatter_into(reduced, input.cpu()), output, reduced)

    def reduce_scatter_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[int] | None = None
    ) -> Work:
        return reduce_in_turn(self, outputs, inputs, keys)

    def all_to_all_into(self, output: Tensor, input: Tensor) -> Work:
        received = torch.empty(output.shape, dtype=output.dtype)
        return _Copied(super().all_to_all_into(received, input.cpu()), output, received)

    def all_reduce(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        copy = tensor.to("cpu", copy=True).contiguous()
        return _Copied(super().all_reduce(copy, kind), tensor, copy)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        copy = tensor.to("cpu", copy=True)
        return _Copied(super().broadcast(copy, source), tensor, copy)

    def send(self, tensor: Tensor, to: int) -> Work:
        copy = tensor.to("cpu", copy=True)
        return _Copied(super().send(copy, to), copy, copy)

    def receive_into(self, tensor: Tensor, source: int) -> Work:
        received = torch.empty(tensor.shape, dtype=tensor.dtype)
        return _Copied(super().receive_into(received, source), tensor, received)


def main() -> int:
    kind = sys.argv[1]
    if kind == "cuda":
        from megazero.verify import program

        # All ranks of the node take its one GPU, and gloo in place of NCCL.
        choose_device = startup.choose_device
        program.choose_device = lambda name, launch: choose_device("cuda", replace(launch, local_rank=0))
        startup._choose_backend = lambda name, device: "gloo"
    with patch.object(startup, "ProcessGroupCommunicator", OverHost):
        return run(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(run_program(main))
