"""Norms of a rank's reduced gradients, fragment by fragment, each computed where its gradient lives.

Gradients in files come to memory block by block, each once: the next one is read while a norm is computed.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from megazero.memory.file_states import FileSlice
from megazero.memory.homes import StateHome
from megazero.memory.lease import Scratch
from megazero.optim.grad_norm import fragment_norms, norm_of_parts, sum_dtype
from megazero.zero.layout import Bucket, Range
from megazero.zero.shards import Shards


class GradientNorms:
    """The norms of the fragments of this rank's partitions, the same in every stage and home."""

    def __init__(self, shards: Shards, fragments: Sequence[tuple[Bucket, Range]], *, reads_ahead: bool) -> None:
        """fragments: the bucket of each, and its range of the bucket's section, in order."""
        self._device = shards.device
        self._reads_ahead = reads_ahead
        self._dtype = sum_dtype(shards.plan.gradient.dtype)
        self._numels = [within.numel for _, within in fragments]
        self._homes = [shards.home(bucket) for bucket, _ in fragments]
        self._in_memory: dict[StateHome, dict[int, Tensor]] = {}  # gradients by their place among all
        self._in_files: dict[int, list[FileSlice]] = {}
        self._blocks: list[FileSlice] = []  # the first slice of each
        last = None
        for place, (bucket, within) in enumerate(fragments):
            for part in shards.gradient_parts(bucket, within):
                source = shards.gradient_source(bucket, part)
                if isinstance(source, Tensor):
                    self._in_memory.setdefault(self._homes[place], {})[place] = source
                    continue
                self._in_files.setdefault(place, []).append(source)
                block = next(group for group in shards.sub_groups(bucket) if part.start < group.within.stop)
                if block is not last:
                    self._blocks.append(source)
                last = block

    @property
    def are_of_files(self) -> bool:
        """True if some gradients pass through the buffers of states in files."""
        return bool(self._in_files)

    def largest_buffer_bytes(self, *, on_device: bool) -> int:
        """The bytes that one fragment takes in the dtype of its norm's sum, of those on the device or of the others."""
        numels = zip(self._numels, self._homes, strict=True)
        return max((numel * self._dtype.itemsize for numel, home in numels if home.is_device == on_device), default=0)

    def take(self, buffers: Scratch) -> Tensor:
        """Return the norms of all fragments, float64 on the device; buffers: the pool of the device."""
        if not self._in_files and all(home.is_device for home in self._in_memory):
            gradients = [gradient for of_home in self._in_memory.values() for gradient in of_home.values()]
            return fragment_norms(gradients, self._device, buffers)
        norms = torch.zeros(len(self._numels), dtype=torch.float64, device=self._device)
        for home, gradients_at in self._in_memory.items():
            found = fragment_norms(list(gradients_at.values()), home.device, home.scratch(buffers))
            norms[torch.tensor(list(gradients_at), device=self._device)] = found.to(self._device)
        if self._in_files:
            found = torch.stack(self._norms_in_files(buffers)).double()
            norms[torch.tensor(list(self._in_files), device=self._device)] = found.to(self._device)
        return norms

    def _norms_in_files(self, buffers: Scratch) -> list[Tensor]:
        blocks = deque(self._blocks)

        def come(part: FileSlice) -> Tensor:
            if blocks and part is blocks[0]:
                blocks.popleft()
                for block in (part, *islice(blocks, 1)) if self._reads_ahead else ():
                    block.fetch()
            elements = part.view()
            part.leave()
            return elements

        return [
            norm_of_parts(map(come, parts), self._numels[place], self._dtype, self._homes[place].scratch(buffers))
            for place, parts in self._in_files.items()
        ]
