"""Measures the bytes of live gradient-sized tensors by a dispatch mode with weak references to new storages."""

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class GradientMeter(TorchDispatchMode):
    """A dispatch mode that counts the bytes of live storages of given sizes; `peak` is the most bytes at once.

    Only storages made while the mode is on count.  numels: sizes in elements that only parameters have in the model
    under test, so that no activation is counted.
    """

    def __init__(self, numels: frozenset[int]) -> None:
        super().__init__()
        self._numels = numels
        self._alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._watch(tensor)
        return result

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        numel = storage.nbytes() // tensor.element_size()
        if numel not in self._numels or id(storage) in self._alive:
            return
        key = storage.data_ptr()
        if key in self._alive:
            return
        self._alive[key] = storage.nbytes()
        weakref.finalize(storage, self._alive.pop, key, None)
        self.peak = max(self.peak, sum(self._alive.values()))
