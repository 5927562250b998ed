"""Runs what a GPU's run compiles as a dry run can: operation by operation, with the memory that compiled code has.

torch's compiler makes a tensor only where something other than its own kernels reads or writes it.  So of what a
function given to `torch.compile` computes, these are counted:

    what a library's kernel makes (a matrix product, attention, an 8-bit rounding), and what it reads
    what the code returns
    what autograd saves, unless backward can make it again from what is saved besides, element by element: without a
    library's kernel, a sum over elements or new random numbers, as the compiler decides what it computes twice

All else is in registers: the ledger passes it over until one of these is true of it.  The same holds in the backward of
such code.  Of an input that is rounded to 8 bits, the columns are saved in its place (`tensor_parallel/float8.py`).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from megazero.memory.ledger import Ledger
from megazero.planner.dry.hollow import Hollow, tensors_in
from megazero.planner.dry.recorder import Recorder
from megazero.zero.parameters.frames import call_on_gradient

_LIBRARY = frozenset(["mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_scaled_mm", "_linear_pointwise"])
_RANDOM = "native_dropout"
_ROUNDING = "megazero"  # the namespace of 8-bit rounding
_AT_LEAF = "AccumulateGrad"
_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
_Storage = weakref.ref[torch.UntypedStorage]


class _Passing(_Storage):
    """A storage in registers.  sources: those that it is computed from; None where it cannot be made again.

    columns: those that are saved in its place.
    """

    __slots__ = ("columns", "key", "sources")

    columns: Tensor | None
    key: int
    sources: tuple[_Storage, ...] | None


class _Rounded:
    """An input as autograd has saved it: columns, packed, and the form of the input itself."""

    def __init__(self, columns: Any, tensor: Tensor) -> None:
        self.columns = columns
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype


class FusedCode:
    """The compiled code of a dry rank; entered inside of its hollow tensors."""

    def __init__(self, ledger: Ledger, recorder: Recorder, hollow: Hollow) -> None:
        self._ledger, self._recorder, self._hollow = ledger, recorder, hollow
        self._is_inside = False
        self._passing: dict[int, _Passing] = {}
        self._columns: dict[int, tuple[_Storage, Tensor]] | None = None  # in a forward, of inputs that are rounded
        self._is_one_pass = False  # the code that runs has called no library, and has no backward
        self._changed: list[Tensor] = []  # of what it has been given
        self._contexts = ExitStack()

    def __enter__(self) -> Self:
        self._contexts.enter_context(patch.object(torch, "compile", self._compiled))
        self._contexts.enter_context(patch.object(torch.compiler, "is_compiling", lambda: self._is_inside))
        self._contexts.enter_context(patch.object(self._hollow, "through", self._operation))
        return self

    def __exit__(self, *exc: object) -> None:
        self._contexts.close()

    def _compiled(self, function: Callable[..., Any], **_options: Any) -> Callable[..., Any]:
        """Return the function as compiled code."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:  # a part of what calls it
                return function(*args, **kwargs)
            given = _tensors((args, kwargs))
            first = self._recorder.num_events
            self._is_one_pass, self._changed = not torch.is_grad_enabled(), []
            saved: list[_Storage] = []
            results: list[Tensor] = []
            self._columns = {}
            try:
                with self._set(inside=True), saved_tensors_hooks(*self._hooks(saved)):
                    found = function(*args, **kwargs)
                results = _tensors(found)
            finally:  # a recomputation may end it early
                self._columns = None
                self._settle(saved, results)
            if self._is_one_pass:
                self._recorder.join(first, function.__name__, given, [*results, *self._changed])
            self._is_one_pass, self._changed = False, []
            self._watch_backward(given, results)
            return found

        return call

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
        if not self._is_inside:
            return self._hollow.run(func, args, kwargs)
        inputs = [*tensors_in((*args, *(kwargs or {}).values()))]
        name, rounds = func._schema.name.partition("::")[2], func.namespace == _ROUNDING
        before = self._passing.get(_key(inputs[0])) if rounds else None
        if before is not None and before.columns is not None:
            rows, _, *scale = self._in_registers(func, args, kwargs, inputs, name)
            return (rows, before.columns, *scale)
        if not (rounds or name in _LIBRARY or "attention" in name):
            return self._in_registers(func, args, kwargs, inputs, name)
        self._is_one_pass = False
        for tensor in inputs:
            self._count(tensor)
        with self._set(inside=False):
            result = self._hollow.run(func, args, kwargs)
        if rounds and self._columns is not None and result[1].numel():
            self._columns[_key(inputs[0])] = _Storage(inputs[0].untyped_storage()), result[1]
        return result

    def _in_registers(
        self, func: Any, args: Any, kwargs: Mapping[str, Any] | None, inputs: Sequence[Tensor], name: str
    ) -> Any:
        """Run an operation of the compiler's own kernels."""
        given = {_key(tensor): tensor.untyped_storage() for tensor in inputs}
        sources = tuple(self._passing.get(key) or _Storage(storage) for key, storage in given.items())
        most = max((tensor.numel() for tensor in inputs), default=0)
        result = self._hollow.run(func, args, kwargs)
        for tensor in tensors_in([result]):
            if self._is_one_pass and func._schema.is_mutable and self._ledger.counts(tensor):
                self._changed.append(tensor)
            elif _key(tensor) not in given and not self._ledger.counts(tensor):
                one = _Passing(tensor.untyped_storage(), self._died)
                one.key, one.columns = _key(tensor), None
                one.sources = sources if name != _RANDOM and tensor.numel() >= most else None
                self._passing[one.key] = one
        return result

    @contextmanager
    def _set(self, *, inside: bool) -> Iterator[None]:
        """Enter compiled code, forward's or backward's, or leave it for a moment."""
        before, self._is_inside = self._is_inside, inside
        self._ledger.passes_over_new = inside
        try:
            yield
        finally:
            self._is_inside = self._ledger.passes_over_new = before

    def _hooks(self, saved: list[_Storage]) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Return hooks of saved tensors that call those in force, which are a recomputation's."""
        pack, unpack = _top_hooks(False) or (_same, _same)

        def packed(tensor: Tensor) -> Any:
            rounded, columns = (self._columns or {}).get(_key(tensor), (None, None))
            if rounded is None or rounded() is None:  # another storage has had this key
                columns = None
            kept = tensor if columns is None else columns
            saved.append(_Storage(kept.untyped_storage()))
            with self._set(inside=_key(kept) in self._passing):  # where views of it are in registers too
                return pack(kept) if columns is None else _Rounded(pack(kept), tensor)

        def unpacked(one: Any) -> Tensor:
            is_rounded = isinstance(one, _Rounded)
            with self._set(inside=False):  # a recomputation runs here, or a gather
                kept: Tensor = unpack(one.columns if is_rounded else one)
            if not is_rounded:
                return kept
            with self._set(inside=True):
                tensor = torch.empty_strided(one.shape, one.stride, dtype=one.dtype)
                self._passing[_key(tensor)].columns = kept
            return tensor

        return packed, unpacked

    def _settle(self, saved: Iterable[_Storage], results: Iterable[Tensor]) -> None:
        """Count what compiled code returns, and what it saves because backward cannot make it again."""
        for tensor in results:
            self._count(tensor)
        storages = [storage for each in saved if (storage := each()) is not None]
        kept = {storage._cdata for storage in storages if storage._cdata not in self._passing}
        made: dict[int, bool] = {}
        for storage in storages:
            one = self._passing.get(storage._cdata)
            if one is not None and not _is_made_of(one, kept, made):
                self._count_storage(storage)
                kept.add(storage._cdata)

    def _count(self, tensor: Tensor) -> None:
        if _key(tensor) in self._passing:
            self._count_storage(tensor.untyped_storage())

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        """Count a storage from now on."""
        del self._passing[storage._cdata]
        self._ledger.enter(storage)

    def _died(self, one: _Storage) -> None:
        assert isinstance(one, _Passing)
        if self._passing.get(one.key) is one:
            del self._passing[one.key]

    def _watch_backward(self, given: Iterable[Tensor], results: Iterable[Tensor]) -> None:
        """Have the backward of compiled code run as compiled code, up to the gradients of what it was given."""
        ends = {tensor.grad_fn for tensor in given}
        for tensor in given:
            if tensor.grad_fn is not None:
                call_on_gradient(tensor, self._count)
        waiting = [tensor.grad_fn for tensor in results]
        while waiting:
            node: Node | None = waiting.pop()
            if node is None or node in ends or node.name().endswith(_AT_LEAF):
                continue
            ends.add(node)
            context = ExitStack()
            node.register_prehook(lambda _, context=context: context.enter_context(self._set(inside=True)))
            node.register_hook(lambda *_, context=context: context.close())
            waiting += [after for after, _ in node.next_functions]


def _is_made_of(one: _Storage, kept: set[int], made: dict[int, bool]) -> bool:
    """Return True if a storage is kept, or can be computed from those that are; those between may be gone.

    made: those of which that is found already, by the identity of what refers to them.
    """
    storage = one()
    if storage is not None and storage._cdata in kept:
        return True
    if not isinstance(one, _Passing) or one.sources is None:
        return False
    if id(one) not in made:
        made[id(one)] = all(_is_made_of(each, kept, made) for each in one.sources)
    return made[id(one)]


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _same(value: Any) -> Any:
    return value


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
