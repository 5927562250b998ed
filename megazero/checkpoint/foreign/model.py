"""Opens a checkpoint of Megatron-LM or DeepSpeed as a model of megazero's, with the optimizer's states where they are.

Three kinds of files have the same face: `names`, `shape` and `tensor` by Megatron-core's names and the kind of state,
`kinds` of the optimizer's states that they have of every parameter, `arguments` of the training, and its `progress`.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from megazero.checkpoint.foreign.distributed import METADATA, DistributedFiles
from megazero.checkpoint.foreign.names import BLOCK, ENDS, HEAD, LAYERS, VOCABULARY, WORDS
from megazero.checkpoint.foreign.settings import has_exact_gelu, model_of
from megazero.checkpoint.foreign.shards import ShardedFiles
from megazero.checkpoint.foreign.universal import STATES, UniversalFiles
from megazero.checkpoint.hugging_face.families import rows_of
from megazero.checkpoint.hugging_face.imported import ImportedWeights, full_shapes, their_shapes
from megazero.checkpoint.state import TrainState
from megazero.config.model import ModelConfig
from megazero.errors import CheckpointError, Problem, raise_problems
from megazero.files import read_bounded
from megazero.optim.loss_scaler import LossScale
from megazero.parallel.param_spec import StateFragment

MEGATRON_LATEST, UNIVERSAL_LATEST = "latest_checkpointed_iteration.txt", "latest_universal"
_MAX_COUNT = 2**48
_MAX_SHOWN = 20


class ForeignFiles(Protocol):
    """The methods that the three kinds of files have in common."""

    path: Path
    kinds: tuple[str, ...]
    reason: str
    arguments: Mapping[str, Any]
    progress: Mapping[str, Any]

    def names(self) -> Iterator[str]:
        """Yield the names of all parameters."""

    def shape(self, name: str, kind: str) -> list[int] | None:
        """Return a tensor's shape, None if there is none."""

    def tensor(self, name: str, kind: str) -> Tensor:
        """Read a tensor."""


class ForeignModel(NamedTuple):
    """A checkpoint of another project's training.

    states: full logical tensors by kind, "weight" first.  progress: the counters of the run, those of step 0 without
    the optimizer's states; seed: the training's.  notes: what is not taken over, and why.
    """

    config: ModelConfig
    vocab_size: int
    states: Mapping[str, ImportedWeights]
    progress: TrainState
    seed: int | None
    notes: tuple[str, ...]

    def fragments(self) -> Iterator[StateFragment]:
        """Yield every tensor as a checkpoint's state, which is read when it is written."""
        for kind, tensors in self.states.items():
            yield from tensors.fragments(kind)


class _OfKind:
    """The tensors of one kind of state, without the vocabulary's padding.

    wanted: the shapes that they have by the arguments of the training, which flat ones do not have.
    """

    def __init__(self, files: ForeignFiles, kind: str, wanted: Mapping[str, list[int]]) -> None:
        self.path = files.path
        self._files, self._kind, self._wanted = files, kind, wanted

    def shape(self, name: str) -> list[int] | None:
        found, wanted = self._files.shape(name, self._kind), self._wanted[name]
        if found and len(found) == 1 < len(wanted):
            row = math.prod(wanted[1:])
            found = [found[0] // row, *wanted[1:]] if found[0] % row == 0 else found
        if found and name in VOCABULARY:
            found[0] = min(found[0], wanted[0])
        return found

    def tensor(self, name: str) -> Tensor:
        found, wanted = self._files.tensor(name, self._kind), self._wanted[name]
        found = found.view(-1, *wanted[1:])
        return found[: wanted[0]] if name in VOCABULARY else found


def find_foreign(folder: Path) -> Path | None:
    """Return the folder of a checkpoint of Megatron-LM or DeepSpeed: this one, or the one that its `latest` file names.

    None if it holds none.  Raises CheckpointError if the file names no folder in it.
    """
    if _kind_of(folder) is not None:
        return folder
    for name, prefix in ((MEGATRON_LATEST, "iter_"), (UNIVERSAL_LATEST, "")):
        path = folder / name
        if not path.exists():
            continue
        try:
            text = read_bounded(path, 4096, inside=folder).decode().strip()
        except (OSError, ValueError) as error:
            raise CheckpointError(Problem(f"{path}: {error}", "names a checkpoint")) from error
        named = folder / (f"{prefix}{int(text):07d}" if prefix and text.isdecimal() and len(text) < 16 else text)
        if named.parent != folder or _kind_of(named) is None:
            raise CheckpointError(Problem(f"{path}: {text[:80]!r}", f"names a checkpoint in {folder}"))
        return named
    return None


def _kind_of(folder: Path) -> type[ShardedFiles | DistributedFiles | UniversalFiles] | None:
    if (folder / METADATA).is_file():
        return DistributedFiles
    if (folder / STATES).is_dir():
        return UniversalFiles
    is_legacy = folder.is_dir() and any(path.name.startswith("mp_rank_") and path.is_dir() for path in folder.iterdir())
    return ShardedFiles if is_legacy else None


def read_foreign(folder: Path, *, vocab_size: int | None = None, with_optimizer: bool = True) -> ForeignModel:
    """Open a checkpoint that `find_foreign` has found.

    vocab_size: the ids that are no padding; without it all rows of the embedding are ids.
    Raises CheckpointError with all that megazero hasn't, is missing or does not fit.
    """
    kind = _kind_of(folder)
    assert kind is not None, "find_foreign has looked"
    files = kind(folder)
    given = f"the arguments in {folder}"
    num_rows = _vocabulary_rows(files)
    if vocab_size is not None and not 2 <= vocab_size <= num_rows:
        given = f"--vocab-size {vocab_size}, where {folder} has an embedding of {num_rows} rows"
        raise CheckpointError(Problem(given, "rows at its end are padding", f"2 to {num_rows}"))
    vocab_size = num_rows if vocab_size is None else vocab_size
    config = model_of(files.arguments, vocab_size=vocab_size, given=given)
    names = set(files.names())
    if config.num_layers > len(names):
        rule = f"tensors for all of them, {len(names)} in all"
        raise CheckpointError(Problem(f"{given}: {config.num_layers} layers", rule))
    shapes = full_shapes(config, vocab_size)
    rows = list(rows_of(shapes, ENDS, BLOCK, layers=LAYERS))
    kinds = ("weight", *(files.kinds if with_optimizer else ()))
    wanted = their_shapes(rows, shapes)
    states = {kind: ImportedWeights(rows, _OfKind(files, kind, wanted), shapes) for kind in kinds}
    raise_problems(CheckpointError, (problem for each in states.values() for problem in each.mismatches(by=given)))
    _refuse_others(files, names, set(wanted))
    notes = []
    if has_exact_gelu(files.arguments):
        notes.append("it was trained with exact GELU; megazero computes the approximation by tanh")
    if with_optimizer and not files.kinds:
        notes.append(f"weights only: {files.reason}")
    seed = files.arguments.get("seed")
    progress = _progress(files) if len(kinds) > 1 else TrainState(LossScale(1.0))
    return ForeignModel(config, vocab_size, states, progress, seed if type(seed) is int else None, tuple(notes))


def _vocabulary_rows(files: ForeignFiles) -> int:
    """Return the number of rows of the embedding, padding included."""
    shape, hidden = files.shape(WORDS, "weight"), files.arguments.get("hidden_size")
    if shape is not None and len(shape) == 1 and type(hidden) is int and hidden > 0:
        shape = [shape[0] // hidden, hidden]
    if shape is None or len(shape) != 2:
        raise CheckpointError(Problem(f"{files.path}: {WORDS}", "a GPT has an embedding of words"))
    return shape[0]


def _refuse_others(files: ForeignFiles, names: set[str], known: set[str]) -> None:
    """Raise CheckpointError for parameters that the model has no place for; a tied head may be stored once more."""
    others = sorted(names - known - {HEAD})
    rule = "megazero's model has no such parameter"
    raise_problems(CheckpointError, (Problem(f"{files.path}: {name}", rule) for name in others[:_MAX_SHOWN]))


def _progress(files: ForeignFiles) -> TrainState:
    """Return the counters of a run that goes on."""
    saved, arguments = files.progress, files.arguments
    steps = _count(saved.get("iteration"), saved.get("global_steps"), arguments.get("iteration"))
    samples = _count(arguments.get("consumed_train_samples"), saved.get("global_samples"))
    if steps is None or samples is None or samples < steps:
        given = f"{files.path}: iteration {steps}, consumed_train_samples {samples}"
        raise CheckpointError(
            Problem(given, "a run goes on from a number of steps and samples", "--weights-only to begin a new run")
        )
    return TrainState(LossScale(1.0), steps, samples, optimizer_steps=steps, update_samples=samples)


def _count(*found: object) -> int | None:
    return next((each for each in found if type(each) is int and 0 <= each < _MAX_COUNT), None)
