"""Writes checkpoints as Megatron-LM and DeepSpeed lay them out, from the tensors of a transformers model.

Names and layouts are those of the two projects' own documentation and converters; nothing here uses megazero's.
Tensors are first those of one process in Megatron-core's names (`Megatron.tensors`), and are then cut for ranks.
"""

import argparse
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

LAYERS, HIDDEN, HEADS, WIDTH, GROUPS, INNER, POSITIONS = 4, 24, 4, 6, 2, 40, 16
VOCABULARY, PADDED = 90, 96
SEED, STEP, SAMPLES = 77, 3, 24
_LAYER = "decoder.layers."
_CUT = {"linear_qkv": 0, "linear_fc1": 0, "word_embeddings": 0, "output_layer": 0, "linear_proj": 1, "linear_fc2": 1}


class Megatron(NamedTuple):
    """A model: its arguments, full tensors by Megatron-core's names, and the same as transformers has them."""

    arguments: dict[str, Any]
    tensors: dict[str, Tensor]
    theirs: dict[str, Tensor]


class _Maker:
    """Makes random tensors, and collects them under both names."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(11)
        self.tensors: dict[str, Tensor] = {}
        self.theirs: dict[str, Tensor] = {}

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator) * 0.3

    def same(self, core: str, theirs: str, *shape: int, turned: bool = False) -> None:
        self.tensors[core] = value = self.random(*shape)
        self.theirs[theirs] = value.T.contiguous() if turned else value

    def vocabulary(self, core: str, theirs: str) -> None:
        self.tensors[core] = self.random(PADDED, HIDDEN)
        self.theirs[theirs] = self.tensors[core][:VOCABULARY].clone()


def arguments(**changes: Any) -> dict[str, Any]:
    """Return arguments of a training that have to do with its model, as Megatron-LM saves them among others."""
    return {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "kv_channels": WIDTH,
        "group_query_attention": False,
        "num_query_groups": 1,
        "ffn_hidden_size": INNER,
        "seq_length": POSITIONS,
        "max_position_embeddings": POSITIONS,
        "position_embedding_type": "learned_absolute",
        "add_position_embedding": True,
        "add_bias_linear": True,
        "swiglu": False,
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,
        "untie_embeddings_and_output_weights": False,
        "bias_gelu_fusion": True,
        "num_experts": None,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "padded_vocab_size": PADDED,
        "params_dtype": torch.bfloat16,
        "seed": SEED,
        "consumed_train_samples": SAMPLES,
        "save": Path("runs"),
        **changes,
    }


def llama() -> Megatron:
    """Return a Llama with groups of queries."""
    made = _Maker()
    made.vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight")
    for index in range(LAYERS):
        core, theirs = f"{_LAYER}{index}.", f"model.layers.{index}."
        made.same(f"{core}input_layernorm.weight", f"{theirs}input_layernorm.weight", HIDDEN)
        query = made.random(HEADS * WIDTH, HIDDEN)
        key, value = made.random(GROUPS * WIDTH, HIDDEN), made.random(GROUPS * WIDTH, HIDDEN)
        for name, tensor in (("q", query), ("k", key), ("v", value)):
            made.theirs[f"{theirs}self_attn.{name}_proj.weight"] = tensor
        parts = zip(query.chunk(GROUPS), key.chunk(GROUPS), value.chunk(GROUPS), strict=True)
        made.tensors[f"{core}self_attention.linear_qkv.weight"] = torch.cat([part for group in parts for part in group])
        made.same(f"{core}self_attention.linear_proj.weight", f"{theirs}self_attn.o_proj.weight", HIDDEN, HEADS * WIDTH)
        made.same(f"{core}pre_mlp_layernorm.weight", f"{theirs}post_attention_layernorm.weight", HIDDEN)
        gate, up = made.random(INNER, HIDDEN), made.random(INNER, HIDDEN)
        made.theirs |= {f"{theirs}mlp.gate_proj.weight": gate, f"{theirs}mlp.up_proj.weight": up}
        made.tensors[f"{core}mlp.linear_fc1.weight"] = torch.cat((gate, up))
        made.same(f"{core}mlp.linear_fc2.weight", f"{theirs}mlp.down_proj.weight", HIDDEN, INNER)
    made.same("decoder.final_layernorm.weight", "model.norm.weight", HIDDEN)
    made.vocabulary("output_layer.weight", "lm_head.weight")
    changes = {"group_query_attention": True, "num_query_groups": GROUPS, "position_embedding_type": "rope"}
    changes |= {"add_bias_linear": False, "swiglu": True, "normalization": "RMSNorm", "rotary_base": 10_000}
    changes |= {"untie_embeddings_and_output_weights": True, "norm_epsilon": 1e-6}
    return Megatron(arguments(**changes), made.tensors, made.theirs)


def gpt2() -> Megatron:
    """Return a GPT-2."""
    made = _Maker()
    made.vocabulary("embedding.word_embeddings.weight", "transformer.wte.weight")
    made.same("embedding.position_embeddings.weight", "transformer.wpe.weight", POSITIONS, HIDDEN)
    for index in range(LAYERS):
        core, theirs = f"{_LAYER}{index}.", f"transformer.h.{index}."
        for ours, name in (("input_layernorm", "ln_1"), ("pre_mlp_layernorm", "ln_2")):
            for end in ("weight", "bias"):
                made.same(f"{core}{ours}.{end}", f"{theirs}{name}.{end}", HIDDEN)
        rows, bias = made.random(3, HEADS, WIDTH, HIDDEN), made.random(3, HEADS, WIDTH)
        made.theirs[f"{theirs}attn.c_attn.weight"] = rows.flatten(0, 2).T.contiguous()
        made.theirs[f"{theirs}attn.c_attn.bias"] = bias.flatten()
        made.tensors[f"{core}self_attention.linear_qkv.weight"] = rows.transpose(0, 1).flatten(0, 2).contiguous()
        made.tensors[f"{core}self_attention.linear_qkv.bias"] = bias.transpose(0, 1).flatten().contiguous()
        linears = (
            ("self_attention.linear_proj", "attn.c_proj", HIDDEN, HIDDEN),
            ("mlp.linear_fc1", "mlp.c_fc", INNER, HIDDEN),
        )
        for ours, name, rows_out, rows_in in (*linears, ("mlp.linear_fc2", "mlp.c_proj", HIDDEN, INNER)):
            made.same(f"{core}{ours}.weight", f"{theirs}{name}.weight", rows_out, rows_in, turned=True)
            made.same(f"{core}{ours}.bias", f"{theirs}{name}.bias", rows_out)
    for end in ("weight", "bias"):
        made.same(f"decoder.final_layernorm.{end}", f"transformer.ln_f.{end}", HIDDEN)
    return Megatron(arguments(), made.tensors, made.theirs)


def bloom() -> Megatron:
    """Return a BLOOM, as Megatron-DeepSpeed trains it."""
    made = _Maker()
    made.vocabulary("embedding.word_embeddings.weight", "transformer.word_embeddings.weight")
    inner = 4 * HIDDEN
    block = {
        "input_layernorm": ("input_layernorm", (HIDDEN,)),
        "pre_mlp_layernorm": ("post_attention_layernorm", (HIDDEN,)),
    }
    block |= {"self_attention.linear_qkv": ("self_attention.query_key_value", (3 * HIDDEN, HIDDEN))}
    block |= {"self_attention.linear_proj": ("self_attention.dense", (HIDDEN, HIDDEN))}
    block |= {
        "mlp.linear_fc1": ("mlp.dense_h_to_4h", (inner, HIDDEN)),
        "mlp.linear_fc2": ("mlp.dense_4h_to_h", (HIDDEN, inner)),
    }
    for end in ("weight", "bias"):
        made.same(f"embedding.norm.{end}", f"transformer.word_embeddings_layernorm.{end}", HIDDEN)
        made.same(f"decoder.final_layernorm.{end}", f"transformer.ln_f.{end}", HIDDEN)
        for index in range(LAYERS):
            for ours, (name, shape) in block.items():
                own = shape if end == "weight" else shape[:1]
                made.same(f"{_LAYER}{index}.{ours}.{end}", f"transformer.h.{index}.{name}.{end}", *own)
    found = arguments(position_embedding_type="alibi", embed_layernorm=True, ffn_hidden_size=inner, num_experts=[1])
    return Megatron(found, made.tensors, made.theirs)


# --- names -----------------------------------------------------------------------------------------------------------

_OLD = {
    "embedding.": "language_model.embedding.",
    "output_layer.": "language_model.output_layer.",
    "decoder.": "language_model.encoder.",
    "linear_qkv": "query_key_value",
    "linear_proj": "dense",
    "linear_fc1": "dense_h_to_4h",
    "linear_fc2": "dense_4h_to_h",
    "pre_mlp_layernorm": "post_attention_layernorm",
}


def old_name(name: str) -> str:
    """Return the name that older versions of Megatron-LM have, and Megatron-DeepSpeed."""
    for core, old in _OLD.items():
        name = name.replace(core, old)
    return name


def engine_name(name: str) -> str:
    """Return the name in a model of Transformer Engine's layers, whose norms are in the layer behind them."""
    name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    return name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")


def pipeline_name(name: str) -> str:
    """Return the name in Megatron-DeepSpeed's pipeline, whose third module is the first layer."""
    old = old_name(name).removeprefix("language_model.")
    if old.startswith("encoder.layers."):
        index, rest = old.removeprefix("encoder.layers.").split(".", 1)
        return f"{int(index) + 3}.{rest}"
    if old.startswith("encoder.final_layernorm."):
        return f"{LAYERS + 4}.{old.rsplit('.', 1)[1]}"
    return old.replace("embedding.norm.", "embedding.word_embeddings.norm.").replace(
        "embedding.", "tied_modules.embed.", 1
    )


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables within tables, as older versions save a model."""
    top: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        held = top
        for part in path[:2]:  # language_model, and its parts
            held = held.setdefault(part, {})
        held[".".join([*path[2:], last])] = value
    return top


# --- files -----------------------------------------------------------------------------------------------------------


def _share(name: str, full: Tensor, rank: int, ranks: int, model: Megatron) -> Tensor:
    """Return the part of a tensor that a tensor-parallel rank holds."""
    dim = next((dim for part, dim in _CUT.items() if part in name and not (dim == 1 and name.endswith("bias"))), None)
    if dim is None or "layernorm" in name:
        return full
    if "linear_fc1" in name and model.arguments["swiglu"]:
        return torch.cat([half.chunk(ranks)[rank] for half in full.chunk(2)])
    return full.chunk(ranks, dim)[rank].clone()


def _in_version(name: str, share: Tensor, version: float, heads: int) -> Tensor:
    """Return queries, keys and values of a rank in the order that an older version has."""
    if "linear_qkv" not in name or version >= 2:
        return share
    packed = share.view(heads, 3, WIDTH, *share.shape[1:])
    return (packed.transpose(0, 1) if version == 0 else packed.transpose(1, 2)).reshape(share.shape).contiguous()


def write_legacy(
    root: Path,
    model: Megatron,
    *,
    tp: int = 1,
    pp: int = 1,
    chunks: int = 1,
    version: float = 3.0,
    name_of: Callable[[str], str] = str,
) -> Path:
    """Write a legacy checkpoint; `chunks` are virtual stages of each of `pp` pipeline stages.  Returns its folder."""
    folder = root / f"iter_{STEP:07d}"
    root.mkdir(parents=True, exist_ok=True)
    (root / "latest_checkpointed_iteration.txt").write_text(str(STEP))
    per_chunk = LAYERS // (pp * chunks)
    for rank in range(tp):
        for stage in range(pp):
            content: dict[str, Any] = {"args": argparse.Namespace(**model.arguments), "iteration": STEP}
            if version:
                content["checkpoint_version"] = version
            content["rng_state"] = [{"torch_rng_state": torch.get_rng_state()}]
            for chunk in range(chunks):
                first = (chunk * pp + stage) * per_chunk
                state: dict[str, Any] = {}
                for name, full in model.tensors.items():
                    share = _share(name, full, rank, tp, model)
                    share = _in_version(name, share, version, HEADS // tp)
                    if name.startswith(_LAYER):
                        index, rest = name.removeprefix(_LAYER).split(".", 1)
                        if first <= int(index) < first + per_chunk:
                            state[name_of(f"{_LAYER}{int(index) - first}.{rest}")] = share
                    elif (chunk, stage) == ((0, 0) if name.startswith("embedding") else (chunks - 1, pp - 1)):
                        state[name_of(name)] = share
                    state["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
                nested = _nested(state) if name_of is old_name else state
                content["model" if chunks == 1 else f"model{chunk}"] = nested
            place = folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            place.mkdir(parents=True)
            torch.save(content, place / "model_optim_rng.pt")
    return folder


def moments(model: Megatron) -> dict[str, dict[str, Tensor]]:
    """Return both moments of every parameter."""
    first = {name: value * 0.5 + 0.1 for name, value in model.tensors.items()}
    return {"exp_avg": first, "exp_avg_sq": {name: value**2 for name, value in first.items()}}


def write_torch_dist(
    root: Path,
    model: Megatron,
    *,
    tp: int = 1,
    stacked: bool = True,
    states: Mapping[str, Mapping[str, Tensor]] | None = None,
    name_of: Callable[[str], str] = str,
) -> Path:
    """Write a torch_dist checkpoint, a file for each tensor-parallel rank; `stacked`: all layers are one tensor."""
    folder = root / f"iter_{STEP:07d}"
    folder.mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text(str(STEP))
    common = {"args": argparse.Namespace(**model.arguments), "iteration": STEP, "checkpoint_version": 3.0}
    torch.save(common, folder / "common.pt")
    listed: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    files = [io.BytesIO() for _ in range(tp)]
    every = {"": model.tensors, **{f"optimizer.state.{kind}.": of for kind, of in (states or {}).items()}}
    for prefix, tensors in every.items():
        for name, full in tensors.items():
            is_stacked = stacked and name.startswith(_LAYER)
            index, rest = name.removeprefix(_LAYER).split(".", 1) if is_stacked else ("0", "")
            key = prefix + name_of(f"{_LAYER}{rest}" if is_stacked else name)
            lead = (LAYERS,) if is_stacked else ()
            entry = listed.setdefault(
                key, TensorStorageMetadata(TensorProperties(full.dtype), torch.Size((*lead, *full.shape)), [])
            )
            for rank, offset, piece in _pieces(name, full, tp, model):
                at = torch.Size(((int(index),) if is_stacked else ()) + offset)
                piece = piece[None] if is_stacked else piece
                begin = files[rank].tell()
                torch.save(piece.clone(), files[rank])
                entry.chunks.append(ChunkStorageMetadata(at, piece.shape))
                places[MetadataIndex(key, at)] = _StorageInfo(f"__{rank}_0.distcp", begin, files[rank].tell() - begin)
    for rank, file in enumerate(files):
        (folder / f"__{rank}_0.distcp").write_bytes(file.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(listed, storage_data=places)))
    return folder


def _pieces(name: str, full: Tensor, tp: int, model: Megatron) -> list[tuple[int, tuple[int, ...], Tensor]]:
    """Return the chunks of a whole tensor: rank, offset and elements."""
    dim = next((dim for part, dim in _CUT.items() if part in name and not (dim == 1 and name.endswith("bias"))), None)
    if dim is None or "layernorm" in name:
        return [(0, (0,) * full.dim(), full)]
    halves = 2 if "linear_fc1" in name and model.arguments["swiglu"] else 1
    parts = full.chunk(halves * tp, dim)
    size = parts[0].shape[dim]
    return [
        (number % tp, tuple(number * size if at == dim else 0 for at in range(full.dim())), part)
        for number, part in enumerate(parts)
    ]


def write_universal(
    root: Path,
    model: Megatron,
    *,
    flat: bool = False,
    name_of: Callable[[str], str] = old_name,
    with_moments: bool = True,
) -> Path:
    """Write a universal checkpoint; `flat` tensors are those of ZeRO stage 3.  The vocabulary has no padding in it."""
    folder = root / f"global_step{STEP}_universal"
    folder.mkdir(parents=True)
    (root / "latest_universal").write_text(folder.name)
    client = {
        "args": argparse.Namespace(**model.arguments),
        "iteration": STEP,
        "checkpoint_version": 3.0,
        "module": None,
    }
    torch.save(client, folder / "mp_rank_00_model_states.pt")
    states = {"fp32": model.tensors, **(moments(model) if with_moments else {})}
    for kind, tensors in states.items():
        for name, full in tensors.items():
            value = (
                full[:VOCABULARY].clone()
                if name in ("embedding.word_embeddings.weight", "output_layer.weight")
                else full
            )
            place = folder / "zero" / name_of(name)
            place.mkdir(parents=True, exist_ok=True)
            torch.save(value.flatten() if flat else {"param": value, "cat_dim": 0}, place / f"{kind}.pt")
            torch.save(torch.tensor(float(STEP)), place / "step.pt")
    return folder
