"""Takes statistics of a model's state between two steps: norms of weights and moments, and the zeros of gradients.

Every rank takes the figures of the elements that it alone counts: its partition of every bucket in all stages, of a
parameter that several ranks hold alike on one of them, and without the vocabulary's padding.  One all-gather of a short
row brings them together.  Nothing is read back from the device: the result is a tensor, which the caller reads on the
host when it likes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.parallel.param_spec import StateFragment
from megazero.zero.engine import Engine

WEIGHT, MOMENTUM, VARIANCE = "weight", "momentum", "variance"
# {name in figures: the kinds of state that optimizers call so}
_KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {WEIGHT: ("weight",), MOMENTUM: ("exp_avg", "momentum_buffer"), VARIANCE: ("exp_avg_sq", "square_avg")}
)
# Elements are copied to float64 and summed so many at a time: on a CPU they stay in the cache, on a GPU in 32 MiB.
_PIECE_NUMEL = MappingProxyType({"cpu": 1 << 16, "cuda": 1 << 22})


class StatisticsChoice(NamedTuple):
    """The statistics that are taken; without any, nothing is computed and nothing is sent."""

    params_norm: bool = False
    num_zeros: bool = False
    optimizer_states: bool = False
    layer_grad_norms: bool = False

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the kinds of state whose norms are taken."""
        if self.optimizer_states:
            return tuple(_KINDS)
        return (WEIGHT,) if self.params_norm else ()


# Those that need nothing but an engine between two steps.
EVERY_STATISTIC = StatisticsChoice(params_norm=True, num_zeros=True, optimizer_states=True)


class _Sums(NamedTuple):
    """The sums over the elements of one kind of state, of a rank or of all: tensors, or numbers once they are read.

    numel: the number of elements.  roots: of square roots, which only a variance has.
    """

    numel: float
    absolutes: float
    squares: float
    roots: float


def take_statistics(engine: Engine, choice: StatisticsChoice) -> Tensor:
    """Return the sums, then the maxima, that `read_statistics` takes: float64, the same on every rank.

    A collective call between two steps.  Gradients count if those of a whole step are there.
    """
    layers = layers_of(engine) if choice.layer_grad_norms else ()
    by_name: dict[str, list[StateFragment]] = {name: [] for name in _KINDS}
    name_of = {kind: name for name in choice.states for kind in _KINDS[name]}
    with torch.no_grad():
        for fragment in engine.owned_state() if name_of else ():
            if fragment.kind in name_of and fragment.spec.trainable:
                by_name[name_of[fragment.kind]].append(fragment)
        device = engine.mesh.device
        numel, num_nonzero = 0, []
        by_layer = {name: _number(0, device) for name in layers}
        if (choice.num_zeros or layers) and engine.has_gradients:
            engine.finish_reductions()
            for fragment in engine.counted_gradients():
                layer = layer_of(fragment.spec.name)
                for piece in _pieces(fragment):  # one by one: those in files come to memory for it
                    if choice.num_zeros:
                        numel += piece.numel()
                        num_nonzero.append(piece.count_nonzero())
                    if layers:
                        by_layer[layer] = by_layer[layer] + _on(device, piece.double().square().sum())
        by_kind = [_sums(found, device, has_roots=name == VARIANCE) for name, found in by_name.items()]
        sums = [part for found, _ in by_kind for part in found]
        sums += [_number(numel, device), _total(num_nonzero, device), *by_layer.values()]
        maxima = [largest for _, largest in by_kind]
        row = torch.stack([*sums, *maxima])
        rows = torch.empty(engine.world.size * len(row), dtype=row.dtype, device=device)
        engine.world.all_gather_into(rows, row).wait()
        rows = rows.view(engine.world.size, len(row))
        return torch.cat([rows[:, : len(sums)].sum(0), rows[:, len(sums) :].amax(0)])


def read_statistics(
    values: Sequence[float], choice: StatisticsChoice, layers: Sequence[str] = (), *, grad_norm: float = 0.0
) -> dict[str, float]:
    """Return figures by name, without those of state that the optimizer does not keep, or not yet.

    values: what `take_statistics` has returned for the same choice.  layers: `layers_of`, whose norms are those of
    averages as `grad_norm`, the whole gradient's, is.
    """
    width = len(_Sums._fields)
    sums = {name: _Sums(*values[width * place : width * (place + 1)]) for place, name in enumerate(_KINDS)}
    numel, num_nonzero = values[width * len(_KINDS) :][:2]
    maxima = dict(zip(_KINDS, values[-len(_KINDS) :], strict=True))
    figures: dict[str, float] = {}
    if choice.params_norm:
        figures["params_norm"] = math.sqrt(sums[WEIGHT].squares)
    if choice.num_zeros and numel:
        figures["num_zeros"] = numel - num_nonzero
    if choice.layer_grad_norms:
        first = width * len(_KINDS) + 2
        squares = values[first : first + len(layers)]
        whole = math.fsum(squares)
        for layer, square in zip(layers, squares, strict=True):
            figures[f"grad_norm.{layer}"] = grad_norm * math.sqrt(square / whole) if whole else 0.0
    for name in (VARIANCE, MOMENTUM, WEIGHT) if choice.optimizer_states else ():
        of_kind = sums[name]
        if not of_kind.numel:
            continue
        figures |= _norms_by_name(name, of_kind.absolutes, of_kind.squares, maxima[name])
        if name == VARIANCE:  # whose elements are not negative, so that they are the squares of their roots
            root = math.sqrt(maxima[name])
            figures |= _norms_by_name(f"{name}_sqrt", of_kind.roots, of_kind.absolutes, root)
    return figures


def layers_of(engine: Engine) -> tuple[str, ...]:
    """Return the layers whose gradients have a norm each, in the order of the parameters; the same on every rank."""
    return tuple(dict.fromkeys(layer_of(name) for name in engine.parameter_names))


def layer_of(name: str) -> str:
    """Return a parameter's layer: its name up to the first number in it, or else the module that it belongs to."""
    *modules, _ = name.split(".")
    number = next((place for place, word in enumerate(modules) if word.isdecimal()), len(modules))
    return ".".join(modules[: number + 1]) or name


def missing_states(kinds: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the figures that an optimizer with these kinds of state does not have."""
    kept = {*kinds, *_KINDS[WEIGHT]}
    return tuple(name for name, called in _KINDS.items() if not kept.intersection(called))


def _norms_by_name(name: str, absolutes: float, squares: float, maximum: float) -> dict[str, float]:
    return {f"{name}_l1": absolutes, f"{name}_l2": math.sqrt(squares), f"{name}_abs_max": maximum}


def _pieces(fragment: StateFragment) -> Iterator[Tensor]:
    """Yield a fragment's elements without padding, which lies behind a rank's rows of the vocabulary."""
    used = fragment.tensor[: max(fragment.spec.box.numel - fragment.start, 0)]
    yield from torch.split(used, _PIECE_NUMEL.get(used.device.type, _PIECE_NUMEL["cpu"])) if used.numel() else ()


def _sums(fragments: Iterable[StateFragment], device: torch.device, *, has_roots: bool) -> tuple[list[Tensor], Tensor]:
    """Return the fields of `_Sums`, and the largest absolute value; zeros of no fragments."""
    absolutes = squares = roots = largest = _number(0, device)
    numel = 0
    for piece in chain.from_iterable(map(_pieces, fragments)):  # one by one: state in files comes to memory for it
        numel += piece.numel()
        values = piece.double().abs()
        absolutes = absolutes + _on(device, values.sum())
        squares = squares + _on(device, values.square().sum())
        largest = torch.maximum(largest, _on(device, values.amax()))
        if has_roots:
            roots = roots + _on(device, values.sqrt().sum())
    return [_number(numel, device), absolutes, squares, roots], largest


def _on(device: torch.device, figure: Tensor) -> Tensor:
    """Return a figure of state that may live in host memory on the device."""
    return figure if figure.device == device else figure.to(device)


def _number(value: int, device: torch.device) -> Tensor:
    """Return a number of the host's as a tensor, for which a GPU's host does not wait."""
    return torch.full((), float(value), dtype=torch.float64, device=device)


def _total(counts: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.stack([_on(device, count) for count in counts]).sum().double() if counts else _number(0, device)
