"""Small GPTs for tests, and the conversion between full logical weights and the parts that a rank holds."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megazero.comm.interface import Communicator
from megazero.comm.local import LocalCommunicator
from megazero.config.derived import padded_vocab_size
from megazero.config.model import ModelConfig
from megazero.model.gpt import GPT
from megazero.parallel.param_spec import named_specs
from megazero.tensor_parallel.layers import TensorParallel
from megazero.tensor_parallel.random import RandomRegions

CPU = torch.device("cpu")


class Piece(NamedTuple):
    """One rank's box of a logical tensor."""

    name: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor


def small_config(**changes: object) -> ModelConfig:
    """Return a model of inconvenient sizes: 3 layers, 12 heads of 5, no dropout."""
    settings = {
        "num_layers": 3,
        "hidden_size": 60,
        "num_attention_heads": 12,
        "seq_length": 12,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return ModelConfig(**{**settings, **changes})


def context(
    communicator: Communicator | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device = CPU,
    seed: int = 1,
) -> TensorParallel:
    """Return a tensor-parallel context, of a single rank if no communicator is given."""
    axis = communicator or LocalCommunicator()
    return TensorParallel(axis, RandomRegions(seed, axis.rank, device), dtype, device)


def build_gpt(config: ModelConfig, tp: TensorParallel, *, vocab_size: int, divisible_by: int = 1) -> GPT:
    """Build a GPT whose parameters are not initialised."""
    padded = padded_vocab_size(vocab_size, divisible_by=divisible_by, tensor_parallel_size=tp.communicator.size)
    return GPT(config, vocab_size=vocab_size, tp=tp, padded_vocab_size=padded)


def put_logical(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Fill every parameter from full logical tensors; padding becomes zero.  The names must be the same."""
    specs = dict(named_specs(model))
    assert {spec.name for spec in specs} == set(weights)
    for spec, parameter in specs.items():
        full = weights[spec.name]
        assert tuple(full.shape) == spec.full_shape, spec
        local = parameter.detach().zero_().view(spec.local_shape)
        local[box_index((0,) * full.ndim, spec.box.lengths)] = full[box_index(spec.box.offset, spec.box.lengths)].to(
            local
        )


def pieces(model: nn.Module, *, gradients: bool = False) -> list[Piece]:
    """Return the piece of every parameter (or gradient) that this rank holds, without padding."""
    found = []
    for spec, parameter in named_specs(model):
        tensor = parameter.grad if gradients else parameter.detach()
        assert tensor is not None, spec.name
        values = tensor.view(spec.local_shape)[box_index((0,) * len(spec.full_shape), spec.box.lengths)]
        found.append(Piece(spec.name, spec.full_shape, spec.box.offset, values.clone()))
    return found


def assemble(ranks: Iterable[Iterable[Piece]]) -> dict[str, Tensor]:
    """Assemble full logical tensors from all ranks' pieces; elements held twice must agree, and none may be missing."""
    full: dict[str, Tensor] = {}
    for piece in (piece for rank in ranks for piece in rank):
        whole = full.setdefault(piece.name, torch.full(piece.full_shape, torch.nan, dtype=piece.values.dtype))
        place = whole[box_index(piece.offset, tuple(piece.values.shape))]
        agrees = place.isnan() | torch.isclose(place, piece.values, rtol=1e-12, atol=1e-15)
        assert bool(agrees.all()), f"ranks disagree about {piece.name}"
        place.copy_(piece.values)
    for name, whole in full.items():
        assert not whole.isnan().any(), f"nobody holds all of {name}"
    return full


def box_index(offset: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the index that takes a box out of a tensor."""
    return tuple(slice(start, start + length) for start, length in zip(offset, lengths, strict=True))
