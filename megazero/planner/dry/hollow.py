"""Hollow tensors: torch's own tensors on the CPU, whose storages lie at addresses that have no memory.

In a `Hollow` context operations make tensors with a shape, a storage and an address, and without values.  What only
looks at storages or makes views runs as it always does, so that views, sizes and addresses are those of real tensors.
What would compute is not run: for every operator and form of its arguments torch's fake tensors show once what comes
out (`FakeTensorMode`), and from then on a call makes that alone.  Single elements of real tensors, such as the number
of steps that `torch.tensor` has made, are computed.

Addresses are of a range that is reserved in a process and never written, so that a storage may have terabytes.  It
reads as zeros, also when the context has ended; what writes there beside torch's operators in it ends the process.
"""

import gc
import math
import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, cast
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.errors import Problem, UsageError

# Bytes of addresses, of the 2^47 that a process mostly has; a system that refuses gives as much as it does.  Few runs
# need more than the first of them, and those of many runs whose tensors are garbage are there side by side.
FIRST_BYTES, RESERVED_BYTES = 1 << 42, 1 << 45
_FEWEST_BYTES = 1 << 36
_PAGE = 4096
_CPU, _META = torch.device("cpu"), torch.device("meta")

# Operators that make views without saying so.
_VIEWS = frozenset(["_unsafe_view", "unsafe_split", "unsafe_split_with_sizes"])

_BATCH_NORM = torch.ops.aten.native_batch_norm.default
_LAYER_NORM = torch.ops.aten.native_layer_norm.default
# Operators whose results have the same form on every device, beside those that work element by element: what most
# operations of a step are.  Others (a group norm's statistics, a decomposition) have strides or dtypes by the device.
_OF_ANY_DEVICE = frozenset([
    "_fused_adamw_", "_linear_pointwise", "_softmax", "_softmax_backward_data",
    "_to_copy", "addmm", "addmm_", "all", "amax", "amin", "arange",
    "baddbmm", "baddbmm_", "bernoulli_", "bmm", "cat", "copy_", "embedding", "embedding_dense_backward",
    "empty", "empty_like", "fill_", "full", "full_like", "gather", "linalg_vector_norm", "masked_fill_", "max",
    "mean", "min", "mm", "native_dropout", "native_layer_norm", "native_layer_norm_backward", "new_empty",
    "new_zeros", "normal_", "ones", "ones_like", "scalar_tensor", "scatter_add_", "select_backward", "slice_backward",
    "stack", "sum", "tril", "triu", "uniform_", "zero_", "zeros", "zeros_like",
])  # fmt: skip
_NUMBER = "_local_scalar_dense"  # tensor.item()
_SPARSE = "_sparse_coo_tensor_with_dims_and_tensors"  # of tensors that are there

_NoSubclass = torch._C.DisableTorchFunctionSubclass
_storage_at: Callable[[int, torch.device, int], Any] = torch._C._construct_storage_from_data_pointer


class _Form(NamedTuple):
    """The form of a tensor that an operator makes."""

    dtype: torch.dtype
    device: torch.device
    nbytes: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class _Manner:
    """The way in which an operator is run.

    is_run: it makes views or a tensor of others, changes what a tensor looks like, or has no tensors; it runs as it is.
    grows: that may need more bytes.  needs_values: it runs where none of its tensors is hollow.  given: the arguments
    that it returns, by their places, or by name if they are keywords; empty if it returns new tensors.  call: runs it,
    without the frame of Python's that the operator itself has.
    """

    is_run: bool
    grows: bool
    needs_values: bool
    given: tuple[int | str, ...]
    call: Callable[..., Any]


class _Block(weakref.ref[torch.UntypedStorage]):
    """The addresses of a hollow storage, which the block does not keep alive."""

    __slots__ = ("address", "key", "nbytes")

    address: int
    key: int
    nbytes: int


@dataclass
class Operators:
    """The operators that have been called with hollow tensors; runs that share them find each only once.

    manners: by operator.  results: by operator and forms of arguments, with a form for every tensor; and whether all of
    these are small.  kinds, kernels: of `Operations`.
    """

    manners: dict[Any, _Manner] = field(default_factory=dict)
    results: dict[Any, tuple[Any, bool]] = field(default_factory=dict)
    kinds: dict[Any, Any] = field(default_factory=dict)
    kernels: dict[Any, Any] = field(default_factory=dict)


class Hollow(TorchDispatchMode):
    """A dispatch mode in which tensors are hollow; modes that are entered later see the same operations.

    resized: called with a hollow storage whose bytes have changed by `resize_` of the storage itself.
    done: called with every operation, its arguments and its result.
    through: called with every operation in place of `run`, which it calls in turn.

    A mode that is entered later would do for both, but torch's way from one mode to the next takes as long as what is
    done in one.
    """

    def __init__(
        self,
        resized: Callable[[torch.UntypedStorage], None] = lambda storage: None,
        operators: Operators | None = None,
        done: Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], None] | None = None,
    ) -> None:
        if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
            given, rule = f"torch {torch.__version__}", "a dry run moves storages by a function that this version lacks"
            raise UsageError(Problem(given, rule, "torch 2.13, here or on any machine, with or without a GPU"))
        TorchDispatchMode.__init__(self)
        self.through: Callable[[Any, tuple[Any, ...], Mapping[str, Any] | None], Any] | None = None
        self._resized, self._done = resized, done
        self._reserved: tuple[mmap.mmap, ...] = ()
        self._regions: list[range] = []  # of addresses
        self._next = self._end = 0  # addresses of the last region; those before the next one have been given out
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # addresses given back, by their bytes
        self._blocks: dict[int, _Block] = {}
        found = Operators() if operators is None else operators
        self._manners, self._results = found.manners, found.results
        self._mode = FakeTensorMode()
        self._contexts = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled in a dry run, and torch's guard takes longer than most operations."""
        return False

    def __enter__(self) -> Self:
        self._contexts.enter_context(patch.object(torch.UntypedStorage, "resize_", self._resize_method()))
        self._contexts.enter_context(patch.object(torch.UntypedStorage, "resizable", self._resizable_method()))
        self._reserve(FIRST_BYTES)
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *exc: object) -> None:
        TorchDispatchMode.__exit__(self, *exc)
        self._contexts.close()
        self._reserved = ()  # they are kept by the storages that are left, which may still be printed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.run(func, args, kwargs) if self.through is None else self.through(func, args, kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
        """Run an operation on hollow tensors, and show it."""
        if self._done is None:
            return self._run(func, args, kwargs)
        with _NoSubclass():  # a subclass has seen the call already, if it was Python's
            result = self._run(func, args, kwargs)
        self._done(func, args, kwargs or {}, result)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
        manner = self._manners.get(func)
        if manner is None:
            manner = self._manners[func] = _manner(func)
        if manner.grows:
            self._grow(*args)
        if manner.is_run or (manner.needs_values and self._has_values(args, kwargs)):
            return manner.call(*args, **kwargs) if kwargs else manner.call(*args)
        key = manner, _signature(args), _signature([*kwargs.items()]) if kwargs else None
        try:
            result, is_small = self._results[key]
        except KeyError:
            result, is_small = self._results[key] = self._result(func, args, kwargs or {})
        if is_small and self._has_values(args, kwargs):
            return manner.call(*args, **(kwargs or {}))
        if manner.given:
            found = [(kwargs or {})[place] if isinstance(place, str) else args[place] for place in manner.given]
            return found[0] if len(found) == 1 else tuple(found)
        return _replaced(result, _Form, self._tensor)

    def _result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, bool]:
        """Return what an operator returns for arguments of these forms, with a form in place of every tensor.

        The second result is True if no tensor that it returns has more than one element.
        """
        found = _on_meta(func, args, kwargs)
        given, named, result = self._on_fake(func, args, kwargs) if found is None else found
        pairs = zip(tensors_in((*args, *kwargs.values())), tensors_in((*given, *named.values())), strict=True)
        if any(one.shape != other.shape for one, other in pairs):
            rule = "a tensor of a dry run keeps the memory that it was made with"
            legal = "an out= of the result's shape, or none"
            raise UsageError(Problem(f"{func}, which changes the shape of what it is given", rule, legal))
        is_small = all(one.numel() <= 1 for one in tensors_in([result]))
        return _replaced(result, Tensor, lambda one: _form(one, one.device if found is None else _CPU)), is_small

    def _on_fake(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """Return fake tensors in place of the arguments, and what the operator returns for them."""
        given, named = _in_place_of(self._fake, args, kwargs)
        with self._mode:
            return given, named, _as_computed(func, given, func(*given, **named))

    def _fake(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor of the same form; inside its mode it would take several times as long to make."""
        return FakeTensor(self._mode, _meta(tensor), tensor.device)

    def _tensor(self, form: _Form) -> Tensor:
        dtype, device, nbytes, offset, shape, strides = form
        if device != _CPU:  # torch's meta tensors have no memory anyway
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)
        storage = _storage_at(self._take(nbytes), _CPU, nbytes)
        storage.reserved = self._reserved
        block = _Block(storage, self._died)
        block.key, block.nbytes, block.address = storage._cdata, nbytes, storage.data_ptr()
        self._blocks[block.key] = block
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)

    def _has_values(self, args: Any, kwargs: Any) -> bool:
        """Return True for arguments with tensors, none of which is hollow."""
        tensors = [one for one in tensors_in((*args, *(kwargs or {}).values())) if not one.is_meta]
        return bool(tensors) and not any(map(self._is_hollow, tensors))

    def _is_hollow(self, tensor: Tensor) -> bool:
        """Return True for a hollow tensor, be its storage empty or a slice of another one."""
        return tensor.untyped_storage()._cdata in self._blocks or any(
            tensor.data_ptr() in region for region in self._regions
        )

    def _grow(self, tensor: Tensor, shape: Sequence[int] | Tensor, *_: object) -> None:
        """Give the storage of a hollow tensor the bytes that another shape needs."""
        numel = shape.numel() if isinstance(shape, Tensor) else math.prod(shape)
        storage, nbytes = tensor.untyped_storage(), int(tensor.storage_offset() + numel) * tensor.element_size()
        block = self._blocks.get(storage._cdata)
        if block is not None and block.nbytes < nbytes:
            self._move(storage, block, nbytes)

    def _resize_method(self) -> Callable[[torch.UntypedStorage, int], torch.UntypedStorage]:
        """Return `UntypedStorage.resize_` for both hollow and other storages."""
        plain: Callable[[torch.UntypedStorage, int], torch.UntypedStorage] = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            block = self._blocks.get(storage._cdata)
            if block is None:
                return plain(storage, nbytes)
            self._move(storage, block, nbytes)
            self._resized(storage)
            return storage

        return resize_

    def _resizable_method(self) -> Callable[[torch.UntypedStorage], bool]:
        plain = torch.UntypedStorage.resizable
        return lambda storage: storage._cdata in self._blocks or plain(storage)

    def _move(self, storage: torch.UntypedStorage, block: _Block, nbytes: int) -> None:
        """Let a storage lie at other addresses, of so many bytes; torch swaps storages if one of them is empty."""
        self._give_back(block)
        block.address, block.nbytes = self._take(nbytes), nbytes
        for address, size in ((0, 0), (block.address, nbytes)):
            cast(Any, storage)._swap_data_ptr_(_storage_at(address, _CPU, size))  # torch's annotations leave it out

    def _take(self, nbytes: int) -> int:
        """Return an address with room for so many bytes; 0 for none."""
        if not nbytes:
            return 0
        room = _pages(nbytes)
        if self._free[room]:
            return self._free[room].pop()
        if self._next + room > self._end:
            self._reserve(RESERVED_BYTES)
        if self._next + room > self._end:
            raise MemoryError(f"hollow tensors have {self._end - self._next} bytes of addresses (see ulimit -v)")
        address, self._next = self._next, self._next + room
        return address

    def _reserve(self, nbytes: int) -> None:
        """Reserve a region of addresses, of which the next tensors get theirs."""
        memory = _reserved(nbytes)
        self._reserved += (memory,)
        self._next = int(np.frombuffer(memory, np.uint8).ctypes.data)
        self._end = self._next + len(memory)
        self._regions.append(range(self._next, self._end))

    def _give_back(self, block: _Block) -> None:
        if block.nbytes:
            self._free[_pages(block.nbytes)].append(block.address)

    def _died(self, block: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(block, _Block)
        del self._blocks[block.key]
        self._give_back(block)


def _reserved(nbytes: int) -> mmap.mmap:
    """Reserve addresses, as many of these as the system gives."""
    while True:
        try:
            return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
        except OSError:
            if nbytes < _FEWEST_BYTES:
                raise
            if not gc.collect():  # earlier tensors, which keep theirs, may be garbage
                nbytes //= 2


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _manner(func: Any) -> _Manner:
    """Return how an operator is run, by what its schema declares of its arguments' memory."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    aliases = [result.alias_info for result in schema.returns]
    is_view = name in _VIEWS or any(alias is not None and not alias.is_write for alias in aliases)
    places = {
        mark: argument.name if argument.kwarg_only else place
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
        for mark in argument.alias_info.before_set
    }
    given = tuple(places[mark] for alias in aliases if alias is not None and not is_view for mark in alias.before_set)
    assert not given or len(given) == len(aliases), f"{func} returns both new tensors and given ones"
    return _Manner(
        # A hollow number is 0.
        is_run=is_view
        or torch.Tag.inplace_view in func.tags
        or name in (_NUMBER, _SPARSE)
        or func.namespace == "profiler",
        grows=name in ("resize_", "resize_as_"),
        needs_values=torch.Tag.data_dependent_output in func.tags,
        given=given,
        call=func._op,
    )


def _signature(value: Any) -> Any:
    """Return what the form of a result depends on."""
    if isinstance(value, Tensor):
        return value.dtype, value.is_meta, value.shape, value.stride()
    kind = type(value)
    if kind is int:
        return value
    if isinstance(value, (tuple, list)):
        return tuple([_signature(one) for one in value])
    return (kind, value) if kind is bool or kind is float else value  # 1 == 1.0 == True


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values and in lists and tuples of them, which are all that operators take."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def _replaced(value: Any, kind: type, made: Callable[[Any], Any]) -> Any:
    """Return a value with what is made of it in place of everything of a kind, also in lists and tuples.

    Arguments and results of operators have no other containers, and the function of torch for all of them takes longer
    than most operators do on meta tensors.
    """
    if isinstance(value, kind):
        return made(value)
    if type(value) is list or type(value) is tuple:
        return type(value)([_replaced(one, kind, made) for one in value])
    return value


def _in_place_of(
    made: Callable[[Tensor], Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an operator with what is made of a tensor in place of every tensor."""
    return _replaced(tuple(args), Tensor, made), {
        name: _replaced(value, Tensor, made) for name, value in kwargs.items()
    }


def _on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any] | None:
    """Return meta tensors in place of arguments on the CPU, and what the operator returns for them.

    That takes a third of the time of a mode of fake tensors.  Return None where the form of a result depends on the
    device, or anything is on another one.
    """
    tensors, device = [*tensors_in((*args, *kwargs.values()))], kwargs.get("device")
    if not (torch.Tag.pointwise in func.tags or func._schema.name.partition("::")[2] in _OF_ANY_DEVICE):
        return None
    if device not in (None, _CPU) or any(one.is_meta for one in tensors):
        return None
    given, named = _in_place_of(_meta, args, kwargs)
    if device is not None or not tensors:
        named["device"] = _META
    return given, named, _as_computed(func, given, func(*given, **named))


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _as_computed(func: Any, given: Sequence[Any], result: Any) -> Any:
    """Return what an operator returns where torch's fake and meta tensors have another dtype, as norms' statistics do.

    A batch's are in the dtype of its running mean, a row's in that of the weight; in the input's if there is none.
    """
    if func is _BATCH_NORM and given[3] is not None:
        dtype = given[3].dtype
    elif func is _LAYER_NORM:
        dtype = (given[0] if given[2] is None else given[2]).dtype
    else:
        return result
    output, *statistics = result
    return (output, *[each.to(dtype) for each in statistics])


def _form(tensor: Tensor, device: torch.device) -> _Form:
    nbytes = tensor.untyped_storage().nbytes()
    offset, shape, strides = int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
    return _Form(tensor.dtype, device, nbytes, offset, shape, strides)
