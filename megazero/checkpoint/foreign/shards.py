"""Megatron-LM's legacy checkpoints: a file for each tensor- and pipeline-parallel rank, and the tensors of them merged.

    iter_0000100/mp_rank_TP/model_optim_rng.pt, or mp_rank_TP_PPP/... with a pipeline

A file has the state of its part of the model under `model`, or with virtual pipeline stages under `model0`, `model1`
and so on.  Layers are numbered in it from 0; over the model they follow each other chunk by chunk, and in each from the
first stage to the last.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.foreign.names import core_name, cut_dim, in_layer, layer_of
from megazero.checkpoint.foreign.settings import arguments_of
from megazero.checkpoint.foreign.torch_files import StoredTensor, TorchFile
from megazero.errors import CheckpointError, Problem, raise_problems

FILES = ("model_optim_rng.pt", "model_rng.pt")
_RANK = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?")
_CHUNK = re.compile(r"model(\d{0,4})")
_MAX_DEPTH = 16


class ShardedFiles:
    """The weights of a legacy checkpoint, by Megatron-core's names."""

    kinds: tuple[str, ...] = ()
    reason = "legacy files do not name the parameters that their optimizer states are of"

    def __init__(self, folder: Path) -> None:
        self.path = folder
        folders = [found for found in map(_RANK.fullmatch, _names(folder)) if found]
        ranks = {(int(found[1]), int(found[2] or 0)): found[0] for found in folders}
        tensor, pipeline = (1 + max(each) for each in zip(*ranks, strict=True))
        given = f"{folder}: {tensor} tensor-parallel x {pipeline} pipeline ranks"
        if len(ranks) != tensor * pipeline:
            raise CheckpointError(Problem(f"{given}, {len(ranks)} folders", "a folder for each of them"))
        contents = {rank: _content(folder / name, folder) for rank, name in sorted(ranks.items())}
        first = contents[0, 0]
        self.arguments = arguments_of(first, given=str(folder))
        self.progress: Mapping[str, Any] = first
        version = first.get("checkpoint_version", 0)
        self._version = float(version) if isinstance(version, int | float) else -1.0
        self._ranks = tensor
        self._shards = _merged(contents, tensor, pipeline, given)
        raise_problems(CheckpointError, self._problems())

    def names(self) -> Iterator[str]:
        """Yield the names of all parameters."""
        yield from self._shards

    def shape(self, name: str, kind: str) -> list[int] | None:
        """Return a tensor's shape over all ranks, None if there is none."""
        shards, dim = self._shards.get(name), cut_dim(name)
        if shards is None or kind != "weight":
            return None
        shape = list(shards[0].shape)
        if dim is not None and dim < len(shape):
            shape[dim] = sum(each.shape[dim] for each in shards)
        return shape

    def tensor(self, name: str, kind: str) -> Tensor:
        """Read a tensor of all ranks."""
        shards, dim = self._shards[name], cut_dim(name)
        if dim is None:
            return shards[0].read()
        parts = [each.read() for each in shards]
        if ".linear_qkv." in name and self._version < 2:
            parts = [self._reordered(each) for each in parts]
        if ".linear_fc1." in name and self.arguments.get("swiglu"):  # each rank has a part of both inner layers
            parts = [half for halves in zip(*(each.chunk(2) for each in parts), strict=True) for half in halves]
        return torch.cat(parts, dim)

    def _reordered(self, packed: Tensor) -> Tensor:
        """Return a rank's queries, keys and values in the order of heads, which older versions have otherwise."""
        heads = self.arguments["num_attention_heads"] // self._ranks
        width, rest = packed.shape[0] // (3 * heads), packed.shape[1:]
        if self._version == 0:
            return packed.view(3, heads, width, *rest).transpose(0, 1).reshape(packed.shape)
        return packed.view(heads, width, 3, *rest).transpose(1, 2).reshape(packed.shape)

    def _problems(self) -> Iterator[Problem]:
        if self._version not in (0, 1) and not self._version >= 2:
            yield Problem(f"{self.path}: checkpoint_version {self._version}", "is known", "0, 1, or 2 and above")
        heads, groups = (self.arguments.get(name) for name in ("num_attention_heads", "group_query_attention"))
        is_old = self._version < 2
        if is_old and (type(heads) is not int or heads < 1 or heads % self._ranks or groups):
            rule = f"{self._ranks} ranks share them, without groups, in a checkpoint of version {self._version}"
            yield Problem(f"{self.path}: {heads} heads", rule)
            return
        for name, shards in self._shards.items():
            dim, shapes = cut_dim(name), [list(each.shape) for each in shards]
            rest = [shape if dim is None else [*shape[:dim], *shape[dim + 1 :]] for shape in shapes]
            multiple = 3 * (heads // self._ranks) if is_old and ".linear_qkv." in name else 1
            multiple = 2 if self.arguments.get("swiglu") and ".linear_fc1." in name else multiple
            if any(each != rest[0] for each in rest) or len(shapes[0]) <= (dim or 0):
                yield Problem(f"{self.path}: {name} of shapes {shapes}", "ranks have equal shares")
            elif any(shape[0] % multiple for shape in shapes):
                yield Problem(f"{self.path}: {name} of shapes {shapes}", f"each has {multiple} parts")


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def _content(rank: Path, inside: Path) -> dict[str, Any]:
    path = next((rank / name for name in FILES if (rank / name).exists()), rank / FILES[0])
    content = TorchFile(path, inside=inside).content
    if not isinstance(content, dict):
        raise CheckpointError(Problem(str(path), "has a table of what was saved"))
    return content


def _merged(
    contents: Mapping[tuple[int, int], dict[str, Any]], tensor: int, pipeline: int, given: str
) -> dict[str, list[StoredTensor]]:
    """Return the shards of every parameter, in the order of tensor-parallel ranks, with layers of the whole model."""
    chunks = sorted(int(found[1] or 0) for found in map(_CHUNK.fullmatch, map(str, contents[0, 0])) if found)
    merged: dict[str, list[StoredTensor]] = {}
    first = 0
    for chunk in chunks:
        for stage in range(pipeline):
            parts = [_parameters(contents[rank, stage], chunk) for rank in range(tensor)]
            count = Counter(name for part in parts for name in part)
            if uneven := [name for name, number in count.items() if number != tensor]:
                raise CheckpointError(Problem(f"{given}: {uneven[0]}", "all tensor-parallel ranks have a part of it"))
            layers = sorted({found[0] for found in map(layer_of, count) if found})
            number_of = {layer: first + index for index, layer in enumerate(layers)}
            for name in count:
                found = layer_of(name)
                global_name = name if found is None else in_layer(number_of[found[0]], found[1])
                merged.setdefault(global_name, [part[name] for part in parts])
            first += len(layers)
    return merged


def _parameters(content: Mapping[str, Any], chunk: int) -> dict[str, StoredTensor]:
    """Return a chunk's parameters by Megatron-core's names."""
    state = content.get(f"model{chunk}", content.get("model") if chunk == 0 else None)
    found: dict[str, StoredTensor] = {}
    pending = [("", state, 0)]
    while pending:
        prefix, held, depth = pending.pop()
        if isinstance(held, StoredTensor):
            name = core_name(prefix.removeprefix("."))
            if name is not None:
                found[name] = held
        elif isinstance(held, dict) and depth < _MAX_DEPTH:
            pending += [(f"{prefix}.{name}", value, depth + 1) for name, value in held.items() if isinstance(name, str)]
    return found
