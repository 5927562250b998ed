"""Linear layers cut over the tensor-parallel ranks (Megatron-LM, section 3).

A *column-parallel* layer cuts its outputs: every rank reads the whole input and computes a part of the output.  A
*row-parallel* layer cuts its inputs: every rank reads its part, and the partial sums are added up.  One after the other
they need a single all-reduce in forward and one in backward:

    x [.., h] --column--> [.., f / t] --pointwise--> [.., f / t] --row--> partial [.., h] --all-reduce--> [.., h]

Where the *sequence is split*, an all-gather and a reduce-scatter replace the all-reduce, and of the input a rank saves
its own tokens only, which backward gathers again (Korthikanti et al., arXiv 2205.05198, section 4.2.2):

    x [n / t, h] --all-gather--> [n, h] --column--> .. --row--> partial [n, h] --reduce-scatter--> [n / t, h]

Weight gradients are computed beside backward's collectives, or *deferred* (`deferred.py`): then a slice of the input
and one of the output's gradient are retained, and gathered when the weight gradient is computed.

Weights are created uninitialised: initial values come from `model/initial_values.py` or a checkpoint.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megazero.comm.interface import Communicator
from megazero.comm.local import LocalCommunicator
from megazero.parallel.gradient_slot import GetGradientSlot, gradient_slot_of
from megazero.parallel.param_spec import InitialValue, ParamSpec, attach_spec
from megazero.tensor_parallel.activation import FusedActivation
from megazero.tensor_parallel.deferred import DeferredGradients, MakeGradient
from megazero.tensor_parallel.products import TORCH, Products
from megazero.tensor_parallel.random import RandomRegions
from megazero.tensor_parallel.regions import Border, exit_region

Defer = Callable[[MakeGradient], None]
_ALONE = Border(LocalCommunicator())


class LinearSettings(NamedTuple):
    """The settings of one linear layer's computation.

    defer: defers the weight's gradient; None computes it in backward.
    get_slot: returns the slot to which that gradient is written; None returns the gradient to autograd.
    """

    border: Border
    products: Products
    defer: Defer | None
    get_slot: GetGradientSlot | None

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor | None:
        """Compute the weight's gradient from grad [n, out], x [n, in]; None if it has been written to its slot."""
        slot = None if self.get_slot is None else self.get_slot()
        if slot is None:
            return self.products.weight_gradient(grad, x)
        self.products.add_weight_gradient(slot.tensor, grad, x, is_first=slot.is_first)
        return None


@dataclass(frozen=True)
class TensorParallel:
    """The surroundings of a layer: the tensor-parallel axis, random states, dtype, device and options.

    hollow: parameters are made without memory, for an engine that allocates and initialises them itself.
    splits_sequence: outside of sharded regions a rank holds its part of the tokens only (sequence parallelism).
    deferred: collects the gradients of parameters for later; None accumulates them in backward.
    products: the matrix products of layers between embedding and head.  head_products: those of the head.
    within_compiled: whether those layers are compiled, and so without side effects: they don't write gradients.
    """

    communicator: Communicator
    random: RandomRegions
    dtype: torch.dtype
    device: torch.device
    hollow: bool = False
    splits_sequence: bool = False
    deferred: DeferredGradients | None = None
    products: Products = TORCH
    head_products: Products = TORCH
    within_compiled: bool = False

    @property
    def border(self) -> Border:
        """The border between the outside and the inside of sharded regions."""
        return Border(self.communicator, self.splits_sequence and self.communicator.size > 1)

    def local_rows(self, num_tokens: int) -> slice:
        """Return the rows of a micro-batch's tokens that this rank holds outside of sharded regions."""
        if not self.border.splits_sequence:
            return slice(0, num_tokens)
        length, rest = divmod(num_tokens, self.communicator.size)
        assert rest == 0, f"{num_tokens} tokens over {self.communicator.size} ranks"
        return slice(self.communicator.rank * length, (self.communicator.rank + 1) * length)

    def row(self, x: Tensor, index: int) -> Tensor:
        """Return row `index` [h] of a micro-batch's tokens on every rank; x [n, h]: the rows that this rank holds."""
        if not self.border.splits_sequence:
            return x[index]
        held = self.local_rows(x.shape[0] * self.communicator.size)
        row = x[index - held.start].clone() if held.start <= index < held.stop else x.new_zeros(x.shape[1])
        self.communicator.all_reduce(row).wait()  # one of the ranks holds it: a sum with zeros
        return row

    def residual_dropout(self, x: Tensor, p: float, training: bool) -> Tensor:
        """Apply dropout outside of sharded regions: the same on every rank, unless each has other tokens."""
        if p == 0 or not training:
            return x
        with self.random.sharded() if self.border.splits_sequence else nullcontext():
            return F.dropout(x, p, training)

    def use(self, parameter: nn.Parameter) -> Tensor:
        """Return the tensor to compute with: the parameter, or its alias if its gradient is deferred."""
        if self.deferred is None or not torch.is_grad_enabled():
            return parameter
        return self.deferred.alias(parameter)

    def linear(self, weight: nn.Parameter, products: Products) -> LinearSettings:
        """Return the settings for a layer with this weight."""
        defer = None
        if self.deferred is not None and weight.requires_grad and torch.is_grad_enabled():
            defer = partial(self.deferred.defer, weight)
        if torch.compiler.is_compiling():
            # Only whole blocks on one tensor rank come here (`model/compiled.py`): nothing is sent, or counted.
            assert self.communicator.size == 1 and self.deferred is None, "code with side effects is not compiled"
            return LinearSettings(_ALONE, products, None, None)
        return LinearSettings(self.border, products, defer, gradient_slot_of(weight))


class ColumnParallelLinear(nn.Module):
    """A layer y = x W^T + b with the outputs cut: [..., in] to [..., out / t].

    If tokens are split: [n / t, in] to [n, out / t].

    logical_shape is the weight's, [*out, in], where the outputs may have several dims; split_dim is the one of them
    that is cut, and the output has this rank's part of all of them, flattened.  The bias is cut in the same way.

    adapter: maps the input to what is added to the output (`adapters.py`); None: nothing.
    leaves_bias_gradient: leaves the gradient of b to the code that reads y (`bias_gradients.py`).
    """

    bias: nn.Parameter | None
    adapter: nn.Module | None

    def __init__(
        self,
        tp: TensorParallel,
        *,
        logical_shape: tuple[int, ...],
        split_dim: int,
        init: InitialValue,
        has_bias: bool = True,
    ) -> None:
        super().__init__()
        assert split_dim < len(logical_shape) - 1, "a column-parallel layer cuts outputs"
        self._tp = tp
        self.products = tp.products
        self.split_dim = split_dim
        self.weight = sharded_parameter(tp, logical_shape, split_dim, init=init)
        outputs = logical_shape[:-1]
        self.bias = (
            sharded_parameter(tp, outputs, split_dim, init=InitialValue("zeros"), flat=True) if has_bias else None
        )
        self.adapter = None

    def forward(self, x: Tensor, *, leaves_bias_gradient: bool = False) -> Tensor:
        weight, bias, linear = self.operands(leaves_bias_gradient=leaves_bias_gradient)
        y = _column_linear(x, weight, bias, linear)
        return y if self.adapter is None else y + self.adapter(x)

    def operands(self, *, leaves_bias_gradient: bool = False) -> "ColumnOperands":
        """Return what `column_linears` needs of the layer."""
        bias = None
        if self.bias is not None:
            bias = self.bias.detach() if leaves_bias_gradient else self._tp.use(self.bias)
        return ColumnOperands(self._tp.use(self.weight), bias, self._tp.linear(self.weight, self.products))


class ReplicatedKeyValueLinear(nn.Module):
    """A layer of keys and values whose heads are not cut evenly over the ranks: [..., in] to [..., 2 k d].

    Ranks share heads, so every rank holds all of them and computes k, those of its queries; the weight's gradient is
    summed over the ranks.  logical_shape is [2, heads, d, in].  Its product is never of 8-bit numbers.

    used: the rank's k heads: one for all of its queries, or one for each of them.  adapter: as of a column-parallel
    layer.
    """

    bias: nn.Parameter | None
    adapter: nn.Module | None

    def __init__(
        self,
        tp: TensorParallel,
        *,
        logical_shape: tuple[int, int, int, int],
        used: Sequence[int],
        init: InitialValue,
        has_bias: bool = True,
    ) -> None:
        super().__init__()
        self._tp = tp
        self._shape = logical_shape
        self.used = tuple(used)
        self.weight = replicated_parameter(tp, logical_shape, init=init, decay=True, is_inside=True)
        zeros = InitialValue("zeros")
        self.bias = (
            replicated_parameter(tp, logical_shape[:-1], init=zeros, decay=False, is_inside=True, flat=True)
            if has_bias
            else None
        )
        self.adapter = None

    def forward(self, x: Tensor) -> Tensor:
        (y,) = column_linears(x, (self.operands(),))
        return y if self.adapter is None else y + self.adapter(x)

    def operands(self) -> "ColumnOperands":
        """Return what `column_linears` needs of the layer."""
        weight = self._of_used(self._tp.use(self.weight).view(self._shape)).flatten(0, 2)
        bias = None if self.bias is None else self._of_used(self._tp.use(self.bias).view(self._shape[:-1])).flatten()
        return ColumnOperands(weight, bias, LinearSettings(self._tp.border, self._tp.head_products, None, None))

    def _of_used(self, whole: Tensor) -> Tensor:
        """Return the heads that are used, [2, k, ...], of all, [2, heads, ...]."""
        return torch.stack([whole[:, head] for head in self.used], dim=1)


class RowParallelLinear(nn.Module):
    """A layer y = x W^T + b with the inputs cut: [..., in / t] to [..., out], the same on every rank.

    If tokens are split: [n, in / t] to [n / t, out].  logical_shape is [out, in].  The bias is replicated and added
    once, after the partial sums have been added up.

    With an activation the layer computes y = activation(x) W^T + b, and saves x alone.  input_bias: the bias that is
    already a part of x, where the layer that made x has left its gradient to this one.

    leaves_bias: leave the addition of b, on several ranks, to the code that reads y; its gradients are not deferred.
    adapter: maps the input, which then is no activation's, to what is added to the output; None: nothing.
    """

    bias: nn.Parameter | None
    adapter: nn.Module | None

    def __init__(
        self, tp: TensorParallel, *, logical_shape: tuple[int, int], init: InitialValue, has_bias: bool = True
    ) -> None:
        super().__init__()
        self._tp = tp
        self.products = tp.products
        self.leaves_bias = False
        self.weight = sharded_parameter(tp, logical_shape, 1, init=init)
        zeros = InitialValue("zeros")
        self.bias = replicated_parameter(tp, logical_shape[:1], init=zeros, decay=False) if has_bias else None
        self.adapter = None

    @property
    def left_bias(self) -> Tensor | None:
        """The bias that is still to be added to the output; None if there is nothing to add."""
        return self.bias if self.leaves_bias else None

    def forward(self, x: Tensor, activation: FusedActivation | None = None, input_bias: Tensor | None = None) -> Tensor:
        y = self._frozen_or_trained(x, activation, input_bias)
        if self.adapter is not None:
            assert activation is None, "an adapter reads the activation's output"
            y = y + self.adapter(x)
        return y

    def _frozen_or_trained(self, x: Tensor, activation: FusedActivation | None, input_bias: Tensor | None) -> Tensor:
        """Compute the layer without its adapter."""
        tp, weight = self._tp, self._tp.use(self.weight)
        bias = None if self.bias is None else tp.use(self.bias)
        linear = tp.linear(self.weight, self.products)
        if tp.communicator.size == 1:  # one partial sum, to which the bias can be added at once
            if activation is not None:
                return _activated_linear(x, input_bias, weight, bias, linear, activation)
            return _column_linear(x, weight, bias, linear)
        if linear.defer is None:
            # Nothing is saved behind the product, so a recomputation ends before the exit's collective.
            alone = linear._replace(border=_ALONE)
            if activation is not None:
                y = exit_region(_activated_linear(x, input_bias, weight, None, alone, activation), tp.border)
            else:
                y = exit_region(_column_linear(x, weight, None, alone), tp.border)
            return y if self.leaves_bias or bias is None else y + bias
        if activation is not None:
            y = _activated_linear(x, input_bias, weight, None, linear, activation)
        else:
            y = _deferred_row_linear(x, weight, linear)
        return y if bias is None else y + bias


class ColumnOperands(NamedTuple):
    """A column-parallel layer's part on this rank: weight [out / t, in], bias [out / t], and its settings."""

    weight: Tensor
    bias: Tensor | None
    linear: LinearSettings


def column_linears(x: Tensor, layers: Sequence[ColumnOperands]) -> tuple[Tensor, ...]:
    """Return the outputs of several column-parallel layers with one input, which is gathered and reduced once."""
    operands = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
    return _column_linears(x, [layer.linear for layer in layers], *operands)


def column_linear(
    tp: TensorParallel, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, *, products: Products
) -> Tensor:
    """Return x W^T + b as the entry of a region: x is gathered, its gradient is reduced."""
    used_bias = None if bias is None else tp.use(bias)
    return _column_linear(x, tp.use(weight), used_bias, tp.linear(weight, products))


def _column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, linear: LinearSettings) -> Tensor:
    return _column_linears(x, [linear], weight, bias)[0]


def sharded_parameter(
    tp: TensorParallel, logical_shape: Sequence[int], split_dim: int, *, init: InitialValue, flat: bool = False
) -> nn.Parameter:
    """Make this rank's equal slice along `split_dim`: [prod(*out), in], or one dim (and no decay) if flat."""
    size, rank = tp.communicator.size, tp.communicator.rank
    assert logical_shape[split_dim] % size == 0, f"{logical_shape[split_dim]} elements over {size} ranks"
    length = logical_shape[split_dim] // size
    local = tuple(length if dim == split_dim else n for dim, n in enumerate(logical_shape))
    offset = tuple(rank * length if dim == split_dim else 0 for dim in range(len(local)))
    shape = (math.prod(local),) if flat else (math.prod(local[:-1]), local[-1])
    spec = ParamSpec(
        "",
        tuple(logical_shape),
        local,
        offset,
        sharded_axes=("tp",),
        decay=not flat,
        writes_gradient=not (flat or tp.within_compiled),
        init=init,
    )
    return uninitialised_parameter(tp, shape, spec)


def replicated_parameter(
    tp: TensorParallel,
    shape: Sequence[int],
    *,
    init: InitialValue,
    decay: bool,
    is_inside: bool = False,
    flat: bool = False,
) -> nn.Parameter:
    """Make a parameter that every tensor-parallel rank holds whole: [prod(*out), in], or one dim if flat.

    is_inside: whether it is used inside of sharded regions, where each rank has a part of its gradient, as ranks have
    where the sequence is split.
    """
    whole = tuple(shape)
    is_summed = is_inside and tp.communicator.size > 1
    spec = ParamSpec(
        "",
        whole,
        whole,
        (0,) * len(whole),
        summed_over=("tp",) if is_summed or tp.border.splits_sequence else (),
        decay=decay,
        init=init,
    )
    held = (math.prod(whole),) if flat or len(whole) == 1 else (math.prod(whole[:-1]), whole[-1])
    return uninitialised_parameter(tp, held, spec)


def uninitialised_parameter(tp: TensorParallel, shape: tuple[int, ...], spec: ParamSpec) -> nn.Parameter:
    """Make a parameter of this shape with its spec, its values undefined (or, if hollow, without memory)."""
    tensor = torch.empty(shape, dtype=tp.dtype, device=tp.device)
    if tp.hollow:
        tensor.untyped_storage().resize_(0)
    return attach_spec(nn.Parameter(tensor), spec)


class _ColumnLinears(torch.autograd.Function):
    """Linear layers as the entry of a region, in one Function so that weight gradients overlap the reduction.

    Their operands are weight, bias, weight, bias, and so on.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        # One parameter beside ctx: without autograd torch.compile leaves ctx out of as many arguments as there are
        # parameters (torch 2.13), and a list of three would have one of its lengths mistaken so.
        x, linears, *operands = arguments
        weights, biases = operands[::2], operands[1::2]
        ctx.linears = linears
        ctx.save_for_backward(x, *weights)
        whole = linears[0].border.gather(x).wait()
        rows = _rows(whole)
        return tuple(
            _in_shape_of(whole, linear.products.output(rows, weight, bias))
            for linear, weight, bias in zip(linears, weights, biases, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        linears, border = ctx.linears, ctx.linears[0].border
        needs_x, _, *needs = ctx.needs_input_grad
        needs_weight, needs_bias = needs[::2], needs[1::2]
        makes_weight = [wanted and linear.defer is None for wanted, linear in zip(needs_weight, linears, strict=True)]
        rows = [_rows(grad) for grad in grads]
        gathering = border.gather(_rows(x)) if any(makes_weight) else None
        reduced = partial_x = None
        if needs_x:
            for linear, weight, grad in zip(linears, weights, rows, strict=True):
                product = linear.products.input_gradient(grad, weight)  # [n, in]
                partial_x = product if partial_x is None else partial_x.add_(product)
        whole = None if gathering is None else gathering.wait()
        if partial_x is not None:
            reduced = border.reduce(partial_x)
        found: list[Tensor | None] = []
        for index, (linear, grad) in enumerate(zip(linears, rows, strict=True)):
            grad_weight = None
            if whole is not None and makes_weight[index]:
                grad_weight = linear.weight_gradient(grad, whole)
            elif needs_weight[index]:
                linear.defer(partial(_late_weight_gradient, linear, grad, x))
            found += [grad_weight, grad.sum(0) if needs_bias[index] else None]
        grad_x = None if reduced is None else reduced.wait().view_as(x)
        return grad_x, None, *found


_column_linears: Callable[..., tuple[Tensor, ...]] = _ColumnLinears.apply


def _late_weight_gradient(linear: LinearSettings, grad: Tensor, x: Tensor) -> Tensor | None:
    """Compute a weight's gradient, for which the input of other ranks is gathered again."""
    return linear.weight_gradient(grad, linear.border.gather(_rows(x)).wait())


class _DeferredRowLinear(torch.autograd.Function):
    """A linear layer and the exit of a region; backward defers the weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, linear: LinearSettings) -> Tensor:
        ctx.linear = linear
        ctx.save_for_backward(x, weight)
        return linear.border.reduce(_in_shape_of(x, linear.products.output(_rows(x), weight, None))).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        linear, rows = ctx.linear, _rows(grad)
        linear.defer(lambda: linear.weight_gradient(linear.border.gather(rows).wait(), _rows(x)))
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return linear.products.input_gradient(linear.border.gather(rows).wait(), weight).view_as(x), None, None


_deferred_row_linear: Callable[..., Tensor] = _DeferredRowLinear.apply


class _ActivatedLinear(torch.autograd.Function):
    """An activation, a linear layer and the exit of its border; only the activation's input is saved.

    Backward needs the activation's output for the weight gradient alone, and makes it again beside the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        input_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        linear: LinearSettings,
        activation: FusedActivation,
    ) -> Tensor:
        ctx.linear, ctx.activation = linear, activation
        ctx.save_for_backward(x, weight)
        product = linear.products.output(_rows(activation.output(x)), weight, bias)
        return linear.border.reduce(_in_shape_of(x, product)).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        linear, rows = ctx.linear, _rows(grad)
        _, needs_input_bias, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        whole = linear.border.gather(rows).wait()
        grad_inner, grad_input_bias = linear.products.input_gradient(whole, weight), None
        if needs_input_bias:
            grad_x, inner, grad_input_bias = ctx.activation.backward_with_sums(grad_inner, _rows(x))
        else:
            grad_x, inner = ctx.activation.backward(grad_inner, _rows(x))
        grad_weight = None
        if linear.defer is not None:
            linear.defer(lambda: linear.weight_gradient(linear.border.gather(rows).wait(), inner))
        elif needs_weight:
            grad_weight = linear.weight_gradient(whole, inner)
        grad_bias = rows.sum(0) if needs_bias else None
        return grad_x.view_as(x), grad_input_bias, grad_weight, grad_bias, None, None


_activated_linear: Callable[..., Tensor] = _ActivatedLinear.apply


def _rows(x: Tensor) -> Tensor:
    """Reshape [..., k] to [n, k]."""
    return x.reshape(-1, x.shape[-1])


def _in_shape_of(x: Tensor, rows: Tensor) -> Tensor:
    """Reshape [n, k] to [..., k], as x is; no view to autograd, which could then not accumulate into it in place."""
    shaped: Tensor = torch.ops.aten._unsafe_view(rows, (*x.shape[:-1], rows.shape[-1]))
    return shaped
