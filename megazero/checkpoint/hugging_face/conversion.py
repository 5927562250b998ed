"""Converts models between Hugging Face's format and megazero's, by the tables of their families (`families.py`).

A transformers model is a folder with `config.json` and `model.safetensors`, or several files of tensors and an index,
`model.safetensors.index.json`.  Tensors are read one at a time, and written one file at a time.  A tied head is not
stored on either side.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megazero.checkpoint.hugging_face.families import FAMILIES, FamilyRow, family_of
from megazero.checkpoint.hugging_face.imported import ImportedModel, ImportedWeights, full_shapes
from megazero.checkpoint.hugging_face.merged import without_adapters
from megazero.checkpoint.reader import Checkpoint
from megazero.config.model import ModelConfig
from megazero.errors import CheckpointError, Problem, raise_problems
from megazero.files import open_regular, parse_json, read_bounded, sync_path

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Transformers' own default.
SHARD_BYTES = 5_000_000_000

_MAX_CONFIG_BYTES = 1 << 20
_MAX_INDEX_BYTES = 1 << 26
_MAX_NUMBER = 2**31


class TensorFiles:
    """The tensors of a Hugging Face folder by name, in one file or in several with an index.

    prefix: of names, which a file that the bare model has written leaves out.

    Raises CheckpointError for files that are missing, or no safetensors files.
    """

    def __init__(self, folder: Path, *, prefix: str) -> None:
        self._prefix = f"{prefix}."
        self._files: dict[Path, Any] = {}
        self._path_of: dict[str, Path] = {}
        index = folder / INDEX_FILE
        if index.exists() and not (folder / WEIGHTS_FILE).exists():
            self.path = index
            for name, file in _read_index(index).items():
                self._path_of[name] = folder / file
            for path in sorted(set(self._path_of.values())):
                self._files[path] = _opened(path)
        else:
            self.path = folder / WEIGHTS_FILE
            self._files[self.path] = _opened(self.path)
            self._path_of = dict.fromkeys(self._files[self.path].keys(), self.path)

    def __len__(self) -> int:
        return len(self._path_of)

    def shape(self, name: str) -> list[int] | None:
        """Return a tensor's shape, None if there is none of this name."""
        found = self._found(name)
        try:
            return None if found is None else list(self._files[self._path_of[found]].get_slice(found).get_shape())
        except SafetensorError:  # the index names another file than the one that has it
            return None

    def tensor(self, name: str) -> Tensor:
        """Read a tensor."""
        found = self._found(name)
        assert found is not None, f"{name} has been found before"
        tensor: Tensor = self._files[self._path_of[found]].get_tensor(found)
        return tensor

    def _found(self, name: str) -> str | None:
        names = (name, name.removeprefix(self._prefix))
        return next((each for each in names if each in self._path_of), None)


def export_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    eod: int | None = None,
    files: Mapping[str, str] = MappingProxyType({}),
    shard_bytes: int = SHARD_BYTES,
) -> str:
    """Write the checkpoint's weights as a Hugging Face model, and return the name of transformers' class.

    `output` appears whole or not at all.  Adapters are merged into the weights beside them.

    dtype: that of the file, the checkpoint's own when None.  eod: the end-of-document id, if known.  files: further
    files of the model, text by name.  shard_bytes: the most bytes of tensors in a file, if it has several.
    Raises CheckpointError when transformers has no such model, when the checkpoint is damaged or not of this model, or
    when output exists already.
    """
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise CheckpointError(Problem(f"--output {output}", "it must not exist yet, or be an empty folder"))
    weights, config = without_adapters(checkpoint, config)
    family = family_of(config)
    word = checkpoint.read_full("embedding.word.weight")
    vocab_size, dtype = word.shape[0], dtype or word.dtype
    del word
    shapes = full_shapes(config, vocab_size)
    rows = list(family.rows(shapes))
    described = their_config(config, vocab_size=vocab_size, eod=eod)
    described["dtype"] = str(dtype).removeprefix("torch.")
    with _appearing(output) as folder:
        for name, text in {CONFIG_FILE: json.dumps(described, indent=2) + "\n", **files}.items():
            (folder / name).write_text(text, encoding="utf-8")
        shards = list(_shards(rows, shapes, shard_bytes // dtype.itemsize))
        index: dict[str, str] = {}
        for number, shard in enumerate(shards):
            name = WEIGHTS_FILE if len(shards) == 1 else f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
            tensors = {}
            for row in shard:
                values = row.form.to_theirs([weights.read_full(ours) for ours in row.ours])
                for theirs, value in zip(row.theirs, values, strict=True):
                    tensors[theirs] = value.to(dtype).contiguous()
            index |= dict.fromkeys(tensors, name)
            save_file(tensors, folder / name, metadata={"format": "pt"})
            # safetensors makes a file that only its owner may read, whatever the umask allows.
            (folder / name).chmod((folder / CONFIG_FILE).stat().st_mode)
        if len(shards) > 1:
            total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
            (folder / INDEX_FILE).write_text(text + "\n", encoding="utf-8")
    return family.architecture


def _shards(rows: Iterable[FamilyRow], shapes: Mapping[str, tuple[int, ...]], most: int) -> Iterator[list[FamilyRow]]:
    """Yield the rows of one file after the other; none has more than `most` elements, unless it has a single row."""
    held: list[FamilyRow] = []
    total = 0
    for row in rows:
        numel = sum(math.prod(shapes[name]) for name in row.ours)
        if held and total + numel > most:
            yield held
            held, total = [], 0
        held.append(row)
        total += numel
    yield held


def read_model(folder: Path) -> ImportedModel:
    """Open the model in a Hugging Face folder.  Raises CheckpointError with all that is missing or does not fit."""
    described = _read_config(folder / CONFIG_FILE)
    config = our_config(described, given=str(folder / CONFIG_FILE))
    family = FAMILIES[described["model_type"]]
    files = TensorFiles(folder, prefix=family.prefix)
    if config.num_layers > len(files):
        given = f"{folder / CONFIG_FILE}: {config.num_layers} layers"
        raise CheckpointError(Problem(given, f"{files.path} has tensors for every layer, {len(files)} in all"))
    shapes = full_shapes(config, described["vocab_size"])
    rows = list(family.rows(shapes))
    weights = ImportedWeights(rows, files, shapes)
    raise_problems(CheckpointError, weights.mismatches(by=CONFIG_FILE))
    return ImportedModel(config, described["vocab_size"], weights)


def _opened(path: Path) -> Any:
    try:
        open_regular(path).close()  # safetensors would wait for a FIFO
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(Problem(f"{path}: {error}", "must be a safetensors file")) from error


def _read_index(path: Path) -> dict[str, str]:
    """Return the file of every tensor, which lies in the index's own folder."""
    found = _read_json(path, most=_MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise CheckpointError(Problem(str(path), "its weight_map has the file of every tensor"))
    raise_problems(
        CheckpointError,
        (
            Problem(f"{path}: {name!r}", "names a file of the same folder")
            for name in sorted(set(found.values()))
            if Path(name).name != name or "\0" in name
        ),
    )
    return found


def their_config(config: ModelConfig, *, vocab_size: int, eod: int | None) -> dict[str, Any]:
    """Return the content of transformers' `config.json` for a model."""
    family = family_of(config)
    return {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        **family.fixed,
        "vocab_size": vocab_size,
        **family.described(config),
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "bos_token_id": eod,
        "eos_token_id": eod,
    }


def our_config(described: Mapping[str, Any], *, given: str) -> ModelConfig:
    """Return the model that a `config.json` describes.  Raises CheckpointError when megazero has no such model."""
    kind = described.get("model_type", "gpt2")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        rule = f"a model of {', '.join(FAMILIES)}"
        raise CheckpointError(Problem(f"{given}: model_type {str(kind)[:80]!r}", rule))
    found = {name: described.get(name, family.defaults.get(name, value)) for name, value in family.fixed.items()}
    problems = [
        Problem(f"{given}: {name} {found[name]!r}", f"only this kind of {kind} is supported", str(value))
        for name, value in family.fixed.items()
        if found[name] != value
    ]
    large = [name for name, value in described.items() if type(value) is int and abs(value) >= _MAX_NUMBER]
    problems += [Problem(f"{given}: {name} {str(described[name])[:80]}", f"is below {_MAX_NUMBER}") for name in large]
    raise_problems(CheckpointError, problems)
    try:
        settings = family.settings(described)
    except (KeyError, ValueError, TypeError, ZeroDivisionError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(Problem(f"{given}: {reason}", f"describes a model of type {kind}")) from error
    whole = ("num_layers", "hidden_size", "num_attention_heads")
    wrong = {name: settings[name] for name in whole if type(settings[name]) is not int or settings[name] < 1}
    if type(described.get("vocab_size")) is not int:
        wrong["vocab_size"] = described.get("vocab_size")
    raise_problems(
        CheckpointError, (Problem(f"{given}: {name} {value!r}", "is a whole number") for name, value in wrong.items())
    )
    heads, hidden = settings["num_attention_heads"], settings["hidden_size"]
    if settings.get("kv_channels") in (None, hidden // heads) and hidden % heads:
        raise CheckpointError(
            Problem(f"{given}: width {hidden}, {heads} heads", "the number of heads divides the width")
        )
    if settings.get("kv_channels") == hidden // heads:
        del settings["kv_channels"]  # as where nothing is set
    try:
        return ModelConfig(
            **settings,
            vocab_size=described["vocab_size"],
            init_method_std=described.get("initializer_range", 0.02),
            untie_embeddings_and_output_weights=not described.get("tie_word_embeddings", family.ties),
        )
    except ValidationError as error:
        told_all = (Problem(f"{given}: {each['loc'][-1]} {each['input']!r}", each["msg"]) for each in error.errors())
        raise CheckpointError(*told_all) from error


def _read_config(path: Path) -> dict[str, Any]:
    return _read_json(path, most=_MAX_CONFIG_BYTES)


def _read_json(path: Path, *, most: int) -> dict[str, Any]:
    try:
        described = parse_json(read_bounded(path, most).decode())
    except (OSError, ValueError) as error:
        raise CheckpointError(Problem(f"{path}: {error}", "must be the JSON file of a Hugging Face model")) from error
    if not isinstance(described, dict):
        raise CheckpointError(Problem(str(path), "must be a JSON object"))
    return described


@contextmanager
def _appearing(output: Path) -> Iterator[Path]:
    """Give a temporary folder to write to, which is synced to disk and becomes `output` at the end."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            sync_path(path)
        os.replace(temporary, output)
        sync_path(output.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(Problem(f"--output {output}: {error}", "the folder must be writable")) from error
    finally:
        with suppress(FileNotFoundError, NotADirectoryError):
            shutil.rmtree(temporary)
