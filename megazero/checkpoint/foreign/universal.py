"""DeepSpeed's universal checkpoints: a folder for each parameter, with a file for each kind of its state.

    global_step100_universal/mp_rank_00_model_states.pt, zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt

Tensors are whole logical ones, without the vocabulary's padding; of ZeRO stage 3 they are flat.  The names are those of
the trained module: Megatron-DeepSpeed's model, or its pipeline, whose modules are numbered.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from megazero.checkpoint.foreign.names import core_name, in_layer, layer_of
from megazero.checkpoint.foreign.settings import arguments_of
from megazero.checkpoint.foreign.torch_files import StoredTensor, TorchFile
from megazero.errors import CheckpointError, Problem

STATES = "zero"
_FILES: Mapping[str, str] = MappingProxyType(
    {"weight": "fp32.pt", "exp_avg": "exp_avg.pt", "exp_avg_sq": "exp_avg_sq.pt"}
)
_MAX_PARAMETERS = 1 << 20


class UniversalFiles:
    """The states in a universal checkpoint, by Megatron-core's names."""

    reason = "a parameter's folder lacks exp_avg.pt or exp_avg_sq.pt"

    def __init__(self, folder: Path) -> None:
        self.path = folder
        models = sorted(path for path in folder.iterdir() if path.name.endswith("model_states.pt"))
        if not models:
            rule = "has the arguments of the training, in *model_states.pt"
            raise CheckpointError(Problem(str(folder), rule))
        content = TorchFile(models[0], inside=folder).content
        self.arguments = arguments_of(content, given=str(models[0]))
        self.progress: Mapping[str, Any] = content
        self._folders = _folders(folder / STATES)
        kinds = tuple(kind for kind in _FILES if all((each / _FILES[kind]).exists() for each in self._folders.values()))
        self.kinds: tuple[str, ...] = ("exp_avg", "exp_avg_sq") if {"exp_avg", "exp_avg_sq"} <= set(kinds) else ()

    def names(self) -> Iterator[str]:
        """Yield the names of all parameters."""
        yield from self._folders

    def shape(self, name: str, kind: str) -> list[int] | None:
        """Return a tensor's shape, None if there is none."""
        if name not in self._folders or not (self._folders[name] / _FILES[kind]).exists():
            return None
        file, stored = self._open(name, kind)
        file.close()
        return list(stored.shape)

    def tensor(self, name: str, kind: str) -> Tensor:
        """Read a tensor."""
        file, stored = self._open(name, kind)
        try:
            return stored.read()
        finally:
            file.close()

    def _open(self, name: str, kind: str) -> tuple[TorchFile, StoredTensor]:
        path = self._folders[name] / _FILES[kind]
        file = TorchFile(path, inside=self.path)
        stored = file.content.get("param") if isinstance(file.content, dict) else file.content
        if not isinstance(stored, StoredTensor):
            file.close()
            raise CheckpointError(Problem(str(path), "has the state of a parameter, a tensor"))
        return file, stored


def _folders(root: Path) -> dict[str, Path]:
    """Return every parameter's folder by its name in Megatron-core, with layers of the whole model numbered from 0."""
    if not root.is_dir():
        raise CheckpointError(Problem(str(root), "has a folder for each parameter"))
    named = {core: path for path in sorted(root.iterdir()) if path.is_dir() and (core := core_name(path.name))}
    if len(named) > _MAX_PARAMETERS:
        raise CheckpointError(Problem(f"{root}: {len(named)} parameters", f"at most {_MAX_PARAMETERS}"))
    places = {name: layer_of(name) for name in named}
    numbers = {layer: index for index, layer in enumerate(sorted({found[0] for found in places.values() if found}))}
    return {
        name if (found := places[name]) is None else in_layer(numbers[found[0]], found[1]): path
        for name, path in named.items()
    }
