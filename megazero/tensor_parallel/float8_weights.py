"""The 8-bit form of weights, made once between two updates and used by every micro-batch and recomputation until then.

A module's weights are quantised just before its first forward after a change: then they are whole, published or
gathered.  What is kept depends on where the weights are:

    whole on every rank (ZeRO 0 to 2)   scale, values by rows and, for the input gradient, by columns: 2 bytes a weight
                                        beside its 2 in bf16
    partitioned (ZeRO 3)                the maximum alone: values of all weights would take as much as the whole
                                        weights, which are partitioned so that no rank holds them; a product rounds by
                                        the maximum, and by delayed scaling without one

A factor is that of the rank's slice of a weight, as where every product finds its own: both give the same numbers.  By
delayed scaling it is known before, and the weight's maximum is recorded here, for later factors.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megazero.memory.ledger_interface import AnyLedger, NullLedger
from megazero.rules.float8 import has_8bit_products
from megazero.tensor_parallel.adapters import Adapter
from megazero.tensor_parallel.float8 import Float8Products, LayerScales, StepWeight, quantise_weight, search_weight
from megazero.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

Linear = ColumnParallelLinear | RowParallelLinear
_Quantise = Callable[[Tensor, LayerScales | None], StepWeight]


class _Held(NamedTuple):
    """A weight and the products that read its 8-bit form."""

    weight: nn.Parameter
    products: Float8Products


def linear_layers(modules: Iterable[nn.Module]) -> list[Linear]:
    """Return the linear layers within the modules, without those of adapters."""
    parts = [part for module in modules for part in module.modules()]
    of_adapters = {part for each in parts if isinstance(each, Adapter) for part in each.modules()}
    return [part for part in parts if isinstance(part, Linear) and part not in of_adapters]


def give_own_products(layers: Iterable[Linear]) -> None:
    """Give every layer products of its own, which hold what is its alone: its weight, or its scales."""
    for layer in layers:
        if isinstance(layer.products, Float8Products):
            layer.products = replace(layer.products)


class QuantisedWeights:
    """Quantises the weights of modules before their first forward after a change."""

    def __init__(
        self,
        layers: Mapping[nn.Module, Sequence[Linear]],
        *,
        count_changes: Callable[[], int],
        keeps_values: bool,
        ledger: AnyLedger | None = None,
    ) -> None:
        """Follow the modules' forwards.

        layers: the linear layers, each with products of its own, by the module whose forward makes their weights whole;
        its hooks come first.  count_changes: returns a number that is another one after every change of the weights.
        """
        self._count_changes = count_changes
        self._ledger = ledger or NullLedger()
        self._quantise: _Quantise = quantise_weight if keeps_values else search_weight
        self._made_at: dict[nn.Module, int] = {}
        self._held = {module: [_held(layer) for layer in each] for module, each in layers.items()}
        held = [one.weight for each in self._held.values() for one in each if has_8bit_products(*one.weight.shape)]
        self.kept_bytes = 2 * keeps_values * sum(weight.numel() for weight in held)
        """The bytes of values on this rank."""
        for module in layers:
            module.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: nn.Module, _inputs: object) -> None:
        now = self._count_changes()
        if self._made_at.get(module) == now:
            return
        for weight, products in self._held[module]:
            if not has_8bit_products(*weight.shape):
                continue
            products.weight = None  # its memory serves the new values
            with torch.no_grad():
                products.weight = made = self._quantise(weight.detach(), products.scales)
            for tensor in (made.maximum, *(made.quantised or ())):
                if tensor is not None:
                    self._ledger.tag(tensor, "parameters")
        self._made_at[module] = now


def _held(layer: Linear) -> _Held:
    assert isinstance(layer.products, Float8Products), "the layer's products are of 8-bit numbers"
    return _Held(layer.weight, layer.products)
