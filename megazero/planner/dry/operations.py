"""The cost of an operator call: a kernel with its floating-point operations and bytes, or nothing at all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from megazero.planner.dry.hollow import Operators, tensors_in
from megazero.planner.trace import Operand, Operation, Order

# Operators without a kernel beside views: memory that is only taken, resized or named anew, or tensors of others.
_NO_KERNEL = frozenset(
    [
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "set_",
        "detach",
        "detach_",
        "alias",
        "lift_fresh",
        "_unsafe_view",
        "_reshape_alias",
        "is_same_size",
        "_local_scalar_dense",
        "item",
        "_sparse_coo_tensor_with_dims_and_tensors",
    ]
)
# Operators that read of their first tensor only what the others select, and those that write only there.
_LOOKED_UP = frozenset(["embedding", "index", "index_select", "gather"])
_WRITTEN_IN_PLACES = frozenset(["index_add_", "index_put_", "index_copy_", "scatter_", "scatter_add_"])
# Products of two matrices, and the place of the first of them among the operator's tensors.
_FIRST_FACTORS = MappingProxyType({"mm": 0, "_linear_pointwise": 0, "addmm": 1, "addmm_": 1})
_FAR_BYTES = 1 << 14  # between columns of which a cache of a few thousand lines, in sets, retains few
# Operators that overwrite what they change, without reading it.
_OVERWRITING = frozenset(
    ["copy_", "zero_", "fill_", "masked_fill_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"]
)


@dataclass(frozen=True, eq=False, slots=True)
class _Kind:
    """The part of an operator's schema that costs depend on: whether it only makes views, and what it writes to.

    first_factor: the place of the first factor of a product of two matrices among its tensors; None for all others.
    """

    name: str
    has_kernel: bool
    written: frozenset[str]
    outs: frozenset[str]
    arguments: tuple[str, ...]
    first_factor: int | None


class Operations:
    """The kernels of a trace; equal ones are one object.  operators: those found so far, by this and other traces."""

    def __init__(self, operators: Operators | None = None) -> None:
        found = Operators() if operators is None else operators
        self._kinds: dict[Any, _Kind] = found.kinds
        self._known: dict[tuple[Any, ...], Operation] = found.kernels

    def of_call(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> tuple[Operation, list[Tensor]] | None:
        """Return the kernel of an operator call and the tensors that go into it; None for a call without a kernel."""
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind(func)
        if not kind.has_kernel:
            return None
        inputs, outputs = [*tensors_in((*args, *kwargs.values()))], [*tensors_in((result,))]
        if not inputs and not outputs:
            return None
        sizes = tuple([(tensor.shape, tensor.dtype) for tensor in (*inputs, *outputs)])
        order = "rows" if kind.first_factor is None else _order(inputs[kind.first_factor])
        key = (kind, len(inputs), sizes, order)
        operation = self._known.get(key)
        if operation is None:
            operation = _operation(kind, func, args, kwargs, result, inputs, outputs)
            operation = self._known[key] = replace(operation, order=order)
        return operation, inputs

    def of_kernel(self, name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> Operation:
        """Return a kernel that reads and writes these tensors once, and multiplies nothing."""
        inputs, outputs = tuple(map(_operand, read)), tuple(map(_operand, written))
        operation = Operation(
            name=name,
            inputs=inputs,
            outputs=outputs,
            flops=0,
            math="",
            read_bytes=sum(tensor.nbytes for tensor in read),
            written_bytes=sum(tensor.nbytes for tensor in written),
        )
        return self._known.setdefault((name, inputs, outputs), operation)


def _kind(func: Any) -> _Kind:
    schema = func._schema
    name = schema.name.partition("::")[2]
    written = frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    outs = frozenset(a.name for a in schema.arguments if a.name in written and a.kwarg_only)
    aliases = any(r.alias_info is not None for r in schema.returns)
    is_view = aliases and not written
    arguments = tuple(a.name for a in schema.arguments)
    has_kernel = not is_view and name not in _NO_KERNEL
    return _Kind(name, has_kernel, written, outs, arguments, _FIRST_FACTORS.get(name))


def _order(matrix: Tensor) -> Order:
    *_, rows, columns = matrix.stride()
    if not rows == 1 < columns:
        return "rows"
    return "far columns" if columns * matrix.element_size() >= _FAR_BYTES else "columns"


def _operation(
    kind: _Kind,
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> Operation:
    named = [*zip(kind.arguments, args, strict=False), *kwargs.items()]
    given = [(name, tensor) for name, value in named for tensor in tensors_in([value])]
    changed = [leaf for name, leaf in given if name in kind.written]
    read = [leaf for name, leaf in given if name not in kind.written]
    overwrites = kind.name in _OVERWRITING
    read_bytes = sum(leaf.nbytes for leaf in read)
    read_bytes += sum(leaf.nbytes for name, leaf in given if name in kind.written - kind.outs and not overwrites)
    written_bytes = sum(leaf.nbytes for leaf in changed) or sum(leaf.nbytes for leaf in outputs)
    if kind.name in _LOOKED_UP and read:
        read_bytes += sum(leaf.nbytes for leaf in outputs) - read[0].nbytes
    elif kind.name in _WRITTEN_IN_PLACES and changed:
        moved = max((leaf.nbytes for leaf in read), default=0)
        read_bytes, written_bytes = read_bytes - changed[0].nbytes + moved, moved
    flops = _flops(func, args, kwargs, result)
    factors = inputs if kind.first_factor is None else inputs[kind.first_factor :]  # not the sum, which may be wider
    multiplied = next((leaf.dtype for leaf in factors if leaf.is_floating_point()), torch.float32)
    return Operation(
        name=kind.name,
        inputs=tuple(map(_operand, inputs)),
        outputs=tuple(map(_operand, outputs)),
        flops=flops,
        math=_dtype_name(multiplied) if flops else "",
        read_bytes=read_bytes,
        written_bytes=written_bytes,
    )


def _operand(tensor: Tensor) -> Operand:
    return Operand(tuple(tensor.shape), _dtype_name(tensor.dtype))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _attention(query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
    """Return the operations of scores and their product with values: query [b, n, s, d], key [b, n, t, d]."""
    return 4 * query.numel() * key.shape[2]


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
    """Return the operations of the backward's five products, of which the first are the scores once more."""
    return 10 * query.numel() * key.shape[2]


def _pointwise_linear(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    """Return the operations of oneDNN's x weight^T: x [..., k], weight [n, k]."""
    return 2 * x.numel() * weight.shape[0]


def _product_in_place(total: Tensor, first: Tensor, second: Tensor, *_: Any, **__: Any) -> int:
    """Return the operations of total += first second: first [..., m, k], second [..., k, n]."""
    return 2 * first.numel() * second.shape[-1]


# Operators whose operations torch does not count.
_UNCOUNTED: Mapping[str, Callable[..., int]] = MappingProxyType(
    {
        "aten::_scaled_dot_product_flash_attention": _attention,  # torch's function takes no groups of heads
        "aten::_scaled_dot_product_flash_attention_backward": _attention_backward,
        "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
        "mkldnn::_linear_pointwise": _pointwise_linear,
        "aten::addmm": _product_in_place,  # with out_dtype, which torch's function takes for a shape
        "aten::addmm_": _product_in_place,
        "aten::baddbmm_": _product_in_place,
    }
)


def _flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    own = _UNCOUNTED.get(func._schema.name)
    counted = flop_registry.get(func.overloadpacket)
    if own is not None:
        return own(*args, **kwargs)
    return 0 if counted is None else int(partial(counted, *args, **kwargs)(out_val=result))
