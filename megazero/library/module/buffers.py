"""Synchronises a module's buffers, such as a BatchNorm's running statistics, as `DistributedDataParallel` does.

Every rank's forward updates its own buffers.  Rank 0's are sent to all before a forward if the forward before was one
whose gradients are synchronised: one that computes gradients, and whose backward ends a step.  So ranks never drift
apart by more than one step, and micro-batches that only accumulate cost no messages.
"""

from itertools import groupby

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megazero.comm.interface import Communicator


class ModuleBuffers:
    """A synchroniser that sets the buffers of one model to data-parallel rank 0's."""

    def __init__(self, model: nn.Module, data_parallel: Communicator) -> None:
        self._communicator = data_parallel
        self._owners = [module for module in model.modules() if module._buffers] if data_parallel.size > 1 else []
        self._is_due = True

    def before_forward(self) -> None:
        """Broadcast the buffers if the last forward was synchronised; a collective call then."""
        if self._is_due:
            self._send()

    def after_forward(self, *, synchronised: bool) -> None:
        """Record a forward.  synchronised: True if its gradients will be synchronised."""
        self._is_due = synchronised

    def _send(self) -> None:
        buffers = {id(b): b for module in self._owners for b in module._buffers.values() if b is not None}
        ordered = sorted(buffers.values(), key=lambda buffer: str(buffer.dtype))
        # An earlier forward may have saved the buffers for its backward, which does not depend on their values.
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(ordered)):
            for _, alike in groupby(ordered, key=lambda buffer: buffer.dtype):
                self._broadcast(list(alike))

    def _broadcast(self, buffers: list[Tensor]) -> None:
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        self._communicator.broadcast(flat, 0).wait()
        for buffer, sent in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(sent.view(buffer.shape))
