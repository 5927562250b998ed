"""Converts GPT-2 between Hugging Face's format and megazero's: one table of names and layouts, read both ways.

A transformers model is a folder with `config.json` and `model.safetensors`.  Its linear layers are *Conv1D*, which
store a matrix as [in, out]; megazero's are [*out, in] with the fused query, key and value as (3, heads, head_dim, in).
A tied head is not stored on either side.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megazero.checkpoint.reader import Checkpoint
from megazero.comm.local import LocalCommunicator
from megazero.config.derived import ffn_hidden_size, max_position_embeddings
from megazero.config.model import ModelConfig
from megazero.errors import CheckpointError, Problem, raise_problems
from megazero.files import open_regular, parse_json, read_bounded, sync_path
from megazero.model.gpt import GPT
from megazero.parallel.param_spec import named_specs
from megazero.tensor_parallel.layers import TensorParallel
from megazero.tensor_parallel.random import RandomRegions

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

# same: unchanged; conv1d: [in, out] in transformers, [*out, in] in megazero; flat: one dim there, several here.
Form = Literal["same", "conv1d", "flat"]

_ENDS: tuple[tuple[str, str, Form], ...] = (
    ("embedding.word.weight", "wte.weight", "same"),
    ("embedding.position.weight", "wpe.weight", "same"),
    ("final_norm.weight", "ln_f.weight", "same"),
    ("final_norm.bias", "ln_f.bias", "same"),
)
_BLOCK: tuple[tuple[str, str, Form], ...] = (
    ("input_norm.weight", "ln_1.weight", "same"),
    ("input_norm.bias", "ln_1.bias", "same"),
    ("attention.qkv.weight", "attn.c_attn.weight", "conv1d"),
    ("attention.qkv.bias", "attn.c_attn.bias", "flat"),
    ("attention.projection.weight", "attn.c_proj.weight", "conv1d"),
    ("attention.projection.bias", "attn.c_proj.bias", "same"),
    ("post_attention_norm.weight", "ln_2.weight", "same"),
    ("post_attention_norm.bias", "ln_2.bias", "same"),
    ("mlp.up.weight", "mlp.c_fc.weight", "conv1d"),
    ("mlp.up.bias", "mlp.c_fc.bias", "same"),
    ("mlp.down.weight", "mlp.c_proj.weight", "conv1d"),
    ("mlp.down.bias", "mlp.c_proj.bias", "same"),
)
# Settings that a transformers configuration must have for a model that megazero has; the values are its defaults too.
_SAME_MODEL: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    }
)


_MAX_CONFIG_BYTES = 1 << 20
_MAX_NUMBER = 2**31


class NamePair(NamedTuple):
    """The two names of one parameter, and how its layout is converted."""

    ours: str
    theirs: str
    form: Form


class ImportedModel(NamedTuple):
    """A Hugging Face model as megazero's: configuration, size of the vocabulary, full logical weights by name."""

    config: ModelConfig
    vocab_size: int
    weights: dict[str, Tensor]


def name_table(config: ModelConfig) -> Iterator[NamePair]:
    """Yield every parameter of the model under both names."""
    for ours, theirs, form in _ENDS:
        yield NamePair(ours, f"transformer.{theirs}", form)
    for index in range(config.num_layers):
        for ours, theirs, form in _BLOCK:
            yield NamePair(f"layers.{index}.{ours}", f"transformer.h.{index}.{theirs}", form)
    if config.untie_embeddings_and_output_weights:
        yield NamePair("head.weight", "lm_head.weight", "same")


def export_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    eod: int | None = None,
    files: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write the checkpoint's weights as a Hugging Face model; `output` appears whole or not at all.

    dtype: that of the file, the checkpoint's own when None.  eod: the end-of-document id, if known.  files: further
    files of the model, text by name.
    Raises CheckpointError when the checkpoint is damaged or not of this model, or when output exists already.
    """
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise CheckpointError(Problem(f"--output {output}", "it must not exist yet, or be an empty folder"))
    tensors = {}
    for row in name_table(config):
        value = to_theirs(checkpoint.read_full(row.ours), row.form)
        tensors[row.theirs] = value.to(dtype or value.dtype).contiguous()
    described = their_config(config, vocab_size=tensors["transformer.wte.weight"].shape[0], eod=eod)
    described["dtype"] = str(tensors["transformer.wte.weight"].dtype).removeprefix("torch.")
    _publish(output, {CONFIG_FILE: json.dumps(described, indent=2) + "\n", **files}, tensors)


def read_model(folder: Path) -> ImportedModel:
    """Read the model in a Hugging Face folder.  Raises CheckpointError with all that is missing or does not fit."""
    described = _read_config(folder / CONFIG_FILE)
    config = our_config(described, given=str(folder / CONFIG_FILE))
    path = folder / WEIGHTS_FILE
    try:
        open_regular(path).close()  # safetensors would wait for a FIFO
        with safe_open(path, framework="pt") as file:
            keys = set(file.keys())
            if config.num_layers > len(keys):
                given = f"{folder / CONFIG_FILE}: n_layer {config.num_layers}"
                raise CheckpointError(Problem(given, f"{path} has tensors for every layer, {len(keys)} in all"))
            shapes = full_shapes(config, described["vocab_size"])
            found = {row: _find(row, keys) for row in name_table(config)}
            problems = [_mismatch(path, file, row, key, shapes[row.ours]) for row, key in found.items()]
            raise_problems(CheckpointError, filter(None, problems))
            weights = {
                row.ours: to_ours(file.get_tensor(key), row.form, shapes[row.ours]) for row, key in found.items()
            }
    except (OSError, SafetensorError) as error:
        raise CheckpointError(Problem(f"{path}: {error}", "must be a safetensors file")) from error
    return ImportedModel(config, described["vocab_size"], weights)


def _find(row: NamePair, keys: set[str]) -> str | None:
    """Return the name that the file uses: one written by the bare GPT2Model, such as OpenAI's, has no prefix."""
    names = (row.theirs, row.theirs.removeprefix("transformer."))
    return next((name for name in names if name in keys), None)


def _mismatch(path: Path, file: Any, row: NamePair, key: str | None, shape: tuple[int, ...]) -> Problem | None:
    wanted = list(to_theirs(torch.empty(shape, device="meta"), row.form).shape)
    found = None if key is None else list(file.get_slice(key).get_shape())
    if found == wanted:
        return None
    actual = "is missing" if found is None else f"has shape {found}"
    return Problem(f"{path}: {row.theirs} {actual}", f"by {CONFIG_FILE} it is a tensor of shape {wanted}")


def to_theirs(value: Tensor, form: Form) -> Tensor:
    """Convert megazero's full logical tensor to the layout of transformers."""
    if form == "same":
        return value
    return value.flatten() if form == "flat" else value.flatten(0, -2).T


def to_ours(value: Tensor, form: Form, shape: tuple[int, ...]) -> Tensor:
    """Convert a tensor of transformers to megazero's full logical one, of `shape`."""
    return (value.T if form == "conv1d" else value).reshape(shape).contiguous()


def full_shapes(config: ModelConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the logical shape of every parameter, by megazero's name, from a model on the meta device."""
    tp = TensorParallel(
        LocalCommunicator(), RandomRegions(0, 0, torch.device("cpu")), torch.float32, torch.device("meta")
    )
    model = GPT(config, vocab_size=vocab_size, tp=tp, padded_vocab_size=vocab_size)
    return {spec.name: spec.full_shape for spec, _ in named_specs(model)}


def their_config(config: ModelConfig, *, vocab_size: int, eod: int | None) -> dict[str, Any]:
    """Return the content of transformers' `config.json` for a model."""
    return {
        **_SAME_MODEL,
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": vocab_size,
        "n_positions": max_position_embeddings(config),
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_attention_heads,
        "n_inner": ffn_hidden_size(config),
        "layer_norm_epsilon": config.norm_epsilon,
        "initializer_range": config.init_method_std,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "bos_token_id": eod,
        "eos_token_id": eod,
    }


def our_config(described: Mapping[str, Any], *, given: str) -> ModelConfig:
    """Return the model that a `config.json` describes.  Raises CheckpointError when megazero has no such GPT-2."""
    other = {name: described[name] for name, value in _SAME_MODEL.items() if described.get(name, value) != value}
    needed = ("vocab_size", "n_embd", "n_layer", "n_head")
    missing = [name for name in needed if type(described.get(name)) is not int]
    large = [name for name, value in described.items() if type(value) is int and abs(value) >= _MAX_NUMBER]
    problems = [
        Problem(f"{given}: {name} {other[name]!r}", "only GPT-2 is supported", str(_SAME_MODEL[name])) for name in other
    ]
    problems += [Problem(f"{given}: {name} {described.get(name)!r}", "is a whole number") for name in missing]
    problems += [Problem(f"{given}: {name} {str(described[name])[:80]}", f"is below {_MAX_NUMBER}") for name in large]
    if not problems and described["n_embd"] % max(1, described["n_head"]):
        problems = [
            Problem(f"{given}: n_embd {described['n_embd']}, n_head {described['n_head']}", "n_head divides n_embd")
        ]
    raise_problems(CheckpointError, problems)
    try:
        return ModelConfig(
            num_layers=described["n_layer"],
            hidden_size=described["n_embd"],
            num_attention_heads=described["n_head"],
            seq_length=described.get("n_positions", 1024),
            vocab_size=described["vocab_size"],
            ffn_hidden_size=described.get("n_inner"),
            hidden_dropout=described.get("resid_pdrop", 0.1),
            attention_dropout=described.get("attn_pdrop", 0.1),
            init_method_std=described.get("initializer_range", 0.02),
            norm_epsilon=described.get("layer_norm_epsilon", 1e-5),
            untie_embeddings_and_output_weights=not described.get("tie_word_embeddings", True),
        )
    except ValidationError as error:
        found = (Problem(f"{given}: {each['loc'][-1]} {each['input']!r}", each["msg"]) for each in error.errors())
        raise CheckpointError(*found) from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        described = parse_json(read_bounded(path, _MAX_CONFIG_BYTES).decode())
    except (OSError, ValueError) as error:
        raise CheckpointError(Problem(f"{path}: {error}", "must be the JSON file of a Hugging Face model")) from error
    if not isinstance(described, dict):
        raise CheckpointError(Problem(str(path), "must be a JSON object"))
    return described


def _publish(output: Path, texts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Write all files to a temporary folder, sync them to disk, rename the folder."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="utf-8")
        save_file(dict(tensors), temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        # safetensors makes a file that only its owner may read, whatever the umask allows.
        (temporary / WEIGHTS_FILE).chmod((temporary / CONFIG_FILE).stat().st_mode)
        for path in (*temporary.iterdir(), temporary):
            sync_path(path)
        os.replace(temporary, output)
        sync_path(output.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(Problem(f"--output {output}: {error}", "the folder must be writable")) from error
    finally:
        with suppress(FileNotFoundError, NotADirectoryError):
            shutil.rmtree(temporary)
