"""Communicators that send quantized numbers (ZeRO++, Wang et al., 2023): gathers of weights, and sums of gradients."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megazero.comm.interface import Communicator, JoinedWork, Work, in_runs, reduce_together
from megazero.comm.wires.codec import BlockCodec, compute_dtype
from megazero.comm.wires.error_feedback import ErrorFeedback
from megazero.comm.wires.forwarding import ForwardingCommunicator
from megazero.comm.wires.hops import Hops
from megazero.memory.homes import StateHome
from megazero.memory.lease import Lease, Scratch

_Hops = Iterator[Sequence[Work]]


class QuantizedGather(ForwardingCommunicator):
    """A communicator whose gathers of floating-point numbers send quantized ones; all else is that of `inner`.

    A rank's own slice is decoded like the others, so that all ranks have the same values; where it lay in its place of
    the output, it is rounded there.  An axis of one rank sends nothing, and rounds nothing.
    """

    def __init__(
        self, inner: Communicator, codec: BlockCodec, scratch: Scratch, *, generator: torch.Generator | None = None
    ) -> None:
        """scratch: lends what is gathered, encoded, for each call that has not been waited for.

        generator: draws the numbers of a stochastic codec, on the tensors' device.
        """
        super().__init__(inner)
        self._codec = codec
        self._scratch = scratch
        self._generator = generator
        self._hops = Hops()

    def all_gather_into(self, output: Tensor, input: Tensor, label: int | None = None) -> Work:
        if self.size == 1 or not input.is_floating_point():
            return super().all_gather_into(output, input, label)
        return self._hops.begin(self._gather([output], [input], label), 1)

    def all_gather_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], label: int | None = None
    ) -> Work:
        if self.size == 1 or not all(input.is_floating_point() for input in inputs):
            return super().all_gather_coalesced(outputs, inputs, label)
        leased = [self.size * self._codec.encoded_bytes(input.numel()) for input in inputs]
        works = [
            self._hops.begin(self._gather(outputs[run], inputs[run], None if run.start else label), 1)
            for run in in_runs(inputs, leased, self._scratch.buffer_bytes)
        ]
        return JoinedWork(works)

    def _gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], label: int | None) -> _Hops:
        """Gather tensors whose encoded slices lie one behind the other in a rank's row."""
        widths = [self._codec.encoded_bytes(input.numel()) for input in inputs]
        encoded = self._scratch.lease(self.size * sum(widths), torch.uint8)
        rows = encoded.tensor.view(self.size, -1)
        parts = torch.split(rows, widths, -1)
        for input, part in zip(inputs, parts, strict=True):
            self._codec.encode(input.view(-1), part[self.rank], self._generator)
        yield [self._inner.all_gather_into(encoded.tensor, rows[self.rank], label)]
        for output, part in zip(outputs, parts, strict=True):
            self._codec.decode(part, output.view(self.size, -1))
        encoded.release()


class EncodedGather:
    """Gathers of rows that every rank stores encoded, and which are decoded where they arrive."""

    def __init__(self, communicator: Communicator, codec: BlockCodec, scratch: Scratch) -> None:
        """scratch: lends what is gathered, encoded, for each call that has not been waited for."""
        self._communicator = communicator
        self._codec = codec
        self._scratch = scratch
        self._hops = Hops()

    def gather_into(self, output: Tensor, row: Tensor, home: StateHome, label: int | None = None) -> Work:
        """Begin to gather every rank's row, uint8 [encoded_bytes(n)] at home, as numbers [ranks n] in rank order."""
        return self._hops.begin(self._gather(output, row, home, label), 1)

    def _gather(self, output: Tensor, row: Tensor, home: StateHome, label: int | None) -> _Hops:
        size = self._communicator.size
        encoded = self._scratch.lease(size * row.numel(), torch.uint8)
        rows = encoded.tensor.view(size, row.numel())
        mine, brought = home.bring(row, rows[self._communicator.rank])
        with brought.ahead():
            gathering = self._communicator.all_gather_into(encoded.tensor, mine, label)
        yield [gathering, brought]
        self._codec.decode(rows, output.view(size, -1))
        encoded.release()


class QuantizedReduceScatter(ForwardingCommunicator):
    """A communicator whose reduce-scatters send quantized numbers; all else is that of `whole`.

    Ranks are numbered as in `two_hops.py`.  A reduce-scatter is two exchanges: the ranks of a node send each other what
    the other is to sum up, quantized; each decodes and sums in float32 (float64 for such tensors), in rank order, its
    own part included; and the ranks across nodes do the same with those sums.  So numbers are rounded twice, whatever
    the number of ranks, and what crosses nodes is 1/I of the whole.  An exchange among one rank is left out.

    With n numbers in a slice, and B(n) the bytes of n encoded ones, a rank sends (I-1) A B(n) bytes inside and (A-1)
    B(n) across.  The result is the same at every call, except for what a stochastic codec draws.
    """

    def __init__(
        self,
        inside: Communicator,
        across: Communicator,
        whole: Communicator,
        codec_inside: BlockCodec,
        codec_across: BlockCodec,
        scratch: Scratch,
        *,
        hops: Hops | None = None,
        feedback: ErrorFeedback | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """whole: the axis as one.

        scratch: lends an exchange's numbers, encoded, twice, and their sum, for each call not waited for.
        hops: those of the other communicators that use `inside` and `across`; by default there are none.
        feedback: keeps errors for calls that have a key.
        generator: draws the numbers of stochastic codecs, on the tensors' device.
        """
        super().__init__(whole)
        assert (whole.size, whole.rank) == (across.size * inside.size, across.rank * inside.size + inside.rank)
        self._shape = across.size, inside.size
        self._exchanges = [
            (axis, codec) for axis, codec in ((inside, codec_inside), (across, codec_across)) if axis.size > 1
        ]
        self._scratch = scratch
        self._hops = hops or Hops()
        self._feedback = feedback
        self._generator = generator

    def reduce_scatter_into(self, output: Tensor, input: Tensor, key: int | None = None) -> Work:
        return self.reduce_scatter_coalesced([output], [input], None if key is None else [key])

    def reduce_scatter_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[int] | None = None
    ) -> Work:
        if not self._exchanges or not all(input.is_floating_point() for input in inputs):
            return reduce_together(self._inner, outputs, inputs, keys)
        return self._hops.begin(self._reduce_scatter(outputs, inputs, keys), len(self._exchanges))

    def _reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[int] | None) -> _Hops:
        """Exchange and sum tensors of one dtype, whose encoded rows lie one behind the other in the rows sent."""
        dtype, (num_nodes, per_node) = compute_dtype(outputs[0].dtype), self._shape
        numels = [output.numel() for output in outputs]
        of_parts: Sequence[int | None] = keys or [None] * len(outputs)
        # The first dimension is that of destinations.
        parts = [input.view(num_nodes, per_node, -1).transpose(0, 1) for input in inputs]
        if per_node == 1:
            parts = [part[0] for part in parts]
        sums: Lease | None = None
        for index, (axis, codec) in enumerate(self._exchanges):
            widths = [codec.encoded_bytes(n) for n in numels]
            shape = (*parts[0].shape[:-1], sum(widths))
            sent, received = (self._scratch.lease(math.prod(shape), torch.uint8) for _ in range(2))
            encoded = torch.split(sent.tensor.view(shape), widths, -1)
            for key, part, rows in zip(of_parts, parts, encoded, strict=True):
                if self._feedback is None or key is None:
                    codec.encode(part, rows, self._generator)
                else:
                    self._feedback.encode(codec, part, rows, (key, index), self._generator)
            if sums is not None:
                sums.release()
            yield [axis.all_to_all_into(received.tensor, sent.tensor)]
            sent.release()
            of_each = [part[0].numel() for part in parts]
            sums = self._scratch.lease(sum(of_each), dtype)
            parts = [
                place.view(part.shape[1:]) for place, part in zip(torch.split(sums.tensor, of_each), parts, strict=True)
            ]
            for part, theirs in zip(parts, torch.split(received.tensor.view(shape), widths, -1), strict=True):
                codec.decode(theirs[0], part)
                for others in theirs[1:]:
                    codec.add_decoded(others, part)
            received.release()
        assert sums is not None
        for output, part in zip(outputs, parts, strict=True):
            output.view(-1).copy_(part.view(-1))
        sums.release()
