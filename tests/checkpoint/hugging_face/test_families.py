"""Tests that models of every family go to transformers and come back: the same logits there, the same bits here."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import reference
from support.checkpoints import run_config, save_checkpoint
from support.each import each
from support.families import FAMILIES as SETTINGS
from support.models import small_config
from support.training import shape_of
from torch import Tensor

from megazero.checkpoint.hugging_face.conversion import (
    CONFIG_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    export_model,
    full_shapes,
    read_model,
)
from megazero.checkpoint.hugging_face.families import FAMILIES, family_of
from megazero.checkpoint.reader import open_checkpoint
from megazero.config.model import ModelConfig
from megazero.errors import CheckpointError

VOCAB = 101
IDS = torch.tensor([[3, 77, 100, 0, 12, 3, 3, 9]])
# {family: settings}; falcon's head has the width that its class gives it, and no interpolation is left out.
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {**SETTINGS["llama3"], "rope_scaling_factor": 8.0},
    "qwen2": {**SETTINGS["qwen2"], "kv_channels": None, "hidden_size": 72, "num_attention_heads": 12},
    "qwen3": {**SETTINGS["qwen3"], "untie_embeddings_and_output_weights": False},
    "bloom": {**SETTINGS["bloom"]},
    "falcon": {
        **SETTINGS["falcon"],
        "kv_channels": None,
        "rotary_percent": 1.0,
        "hidden_size": 48,
        "ffn_hidden_size": 80,
    },
    "falcon, all heads": {
        "position_embedding_type": "rope",
        "hidden_size": 48,
        "untie_embeddings_and_output_weights": True,
    },
    "llama, all heads": {**SETTINGS["llama2"], "rotary_seq_len_interpolation_factor": 4.0},
}


def model_of(name: str) -> ModelConfig:
    return small_config(**{"init_method_std": 0.2, "vocab_size": VOCAB, **MODELS[name]})


def saved(folder: Path, name: str) -> dict[str, Tensor]:
    weights = save_checkpoint(folder / "run", run_config(model_of(name)), vocab_size=VOCAB, tp=2)
    return weights


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that exports a model in shards, once, and returns the folder, which stays as it is."""

    @cache
    def export(name: str) -> Path:
        folder = tmp_path_factory.mktemp("exported")
        saved(folder, name)
        export_model(open_checkpoint(folder / "run"), model_of(name), folder / "hf", shard_bytes=60_000)
        return folder / "hf"

    return export


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard_bytes", [10**9, 60_000])
def test_there_and_back(name: str, shard_bytes: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    weights = saved(tmp_path, name)
    kind = export_model(
        open_checkpoint(tmp_path / "run"), model_of(name), tmp_path / "hf", eod=5, shard_bytes=shard_bytes
    )
    is_sharded = (tmp_path / "hf" / INDEX_FILE).exists()
    assert is_sharded is (shard_bytes < 10**6)
    if is_sharded:
        described = json.loads((tmp_path / "hf" / INDEX_FILE).read_text())
        sizes = [path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors")]
        assert len(sizes) == len(set(described["weight_map"].values())) > 3
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64).eval()
    assert type(theirs).__name__ == kind and theirs.config.eos_token_id == 5
    expected = reference.logits(weights, IDS, shape_of(model_of(name)))
    # Norms and softmax are in float32 there.
    torch.testing.assert_close(theirs(IDS).logits.detach(), expected, rtol=1e-4, atol=1e-5)
    back = read_model(tmp_path / "hf")
    dropped = [(each.hidden_dropout, each.attention_dropout) for each in (back.config, model_of(name))]
    assert dropped[0] == dropped[1]
    assert family_of(back.config) == family_of(model_of(name)) and back.vocab_size == VOCAB
    assert shape_of(back.config) == shape_of(model_of(name))
    assert back.weights.keys() == weights.keys()
    for key, value in weights.items():
        assert torch.equal(back.weights[key].double(), value), key


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_has_written_is_read(name: str, exported: Callable[[str], Path], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported(name), dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.1, 0.2, generator=generator)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    ours = read_model(tmp_path / "theirs")
    weights = {key: value.double() for key, value in ours.weights.items()}
    expected = reference.logits(weights, IDS, shape_of(ours.config))
    torch.testing.assert_close(theirs(IDS).logits.detach(), expected, rtol=1e-4, atol=1e-5)


def test_every_parameter_has_one_row() -> None:
    for name in MODELS:
        shapes = full_shapes(model_of(name), VOCAB)
        rows = list(family_of(model_of(name)).rows(shapes))
        ours, theirs = ([key for row in rows for key in getattr(row, side)] for side in ("ours", "theirs"))
        assert sorted(ours) == sorted(shapes) and len(set(theirs)) == len(theirs)


@each(
    ("settings", "told"),
    [
        ({"squared_relu": True}, "activation squared_relu"),
        ({**SETTINGS["llama2"], "rotary_percent": 0.5}, "rotary_percent 0.5"),
        ({**SETTINGS["llama2"], "qk_layernorm": True, "add_qkv_bias": True}, "queries, keys and values True"),
        ({**SETTINGS["bloom"], "kv_channels": 8}, "width another"),
        ({"position_embedding_type": "none"}, "position_embedding_type none"),
    ],
)
def test_models_without_a_class_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        family_of(small_config(**settings))
    (problem,) = caught.value.problems
    assert told in problem.given and "no class" in problem.rule


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 2.0}}, "low_freq_factor"),
        ("llama", {"sliding_window": 4}, "sliding_window 4"),
        ("llama", {"mlp_bias": True}, "mlp_bias True"),
        ("llama", {"intermediate_size": None}, "ffn_hidden_size|shape"),
        ("llama", {"hidden_size": "wide"}, "wide|unsupported"),
        ("llama", {"num_attention_heads": 0}, "by zero|0"),
        ("falcon", {"parallel_attn": True}, "parallel_attn True"),
        ("bloom", {"n_head": None}, "num_attention_heads None"),
        ("bloom", {"model_type": ["bloom"]}, "model_type"),
    ],
)
def test_other_configurations_are_refused(
    name: str, changes: dict[str, Any], told: str, exported: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(exported(name), tmp_path / "hf")
    file = tmp_path / "hf" / CONFIG_FILE
    described = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match=told):
        read_model(tmp_path / "hf")


def test_a_falcon_that_says_nothing_is_transformers_own(tmp_path: Path) -> None:
    """Its default is attention beside the feed-forward layers, which no model of megazero has."""
    described = {"model_type": "falcon", "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**described, "vocab_size": 9}))
    with pytest.raises(CheckpointError, match="parallel_attn True"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ({"weight_map": {"a": "../other.safetensors"}}, "a file of the same folder"),
        ({"weight_map": ["a"]}, "weight_map"),
        ([], "must be a JSON object"),
        ({"weight_map": {"a": "gone.safetensors"}}, "must be a safetensors file"),
    ],
)
def test_a_wrong_index_is_refused(index: object, told: str, exported: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(exported("llama"), tmp_path / "hf")
    (tmp_path / "hf" / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=told):
        read_model(tmp_path / "hf")


def test_a_tensor_in_another_file_than_the_index_says_is_missing(
    exported: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(exported("llama"), tmp_path / "hf")
    file = tmp_path / "hf" / INDEX_FILE
    described = json.loads(file.read_text())
    names = sorted(set(described["weight_map"].values()))
    described["weight_map"]["model.norm.weight"] = names[-1]
    file.write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        read_model(tmp_path / "hf")


def test_families_are_told_apart() -> None:
    assert [family_of(model_of(name)).model_type for name in MODELS] == [
        "gpt2",
        "llama",
        "qwen2",
        "qwen3",
        "bloom",
        "falcon",
        "falcon",
        "llama",
    ]
    assert set(FAMILIES) == {"gpt2", "llama", "mistral", "qwen2", "qwen3", "bloom", "falcon"}


@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "falcon"])
def test_adapters_are_merged(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = replace(model_of(name), lora_rank=3, lora_alpha=5.0, lora_targets=("linear_qkv", "linear_fc2"))
    weights = save_checkpoint(tmp_path / "run", run_config(model), vocab_size=VOCAB, tp=2)
    assert sum(".adapter." in each for each in weights) >= 4 * model.num_layers
    export_model(open_checkpoint(tmp_path / "run"), model, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64).eval()
    expected = reference.logits(weights, IDS, shape_of(model))
    # Rotary positions and ALiBi are tables in float32 there.
    exact = name in ("gpt2", "falcon")
    rtol, atol = (1e-9, 1e-10) if exact else (1e-4, 1e-5)
    torch.testing.assert_close(theirs(IDS).logits.detach(), expected, rtol=rtol, atol=atol)
    plain = {each: value for each, value in weights.items() if ".adapter." not in each}
    assert (reference.logits(plain, IDS, shape_of(model)) - expected).abs().max() > 0.01


def test_sums_of_merged_weights_are_rounded_once(tmp_path: Path) -> None:
    model = replace(model_of("gpt2"), lora_rank=3)
    weights = save_checkpoint(tmp_path / "run", run_config(model), vocab_size=VOCAB, tp=1)
    export_model(open_checkpoint(tmp_path / "run"), model, tmp_path / "hf", dtype=torch.bfloat16)
    name = "layers.0.mlp.up"
    expected = reference.adapted(weights, 1.0)[f"{name}.weight"].bfloat16().T
    found = load_file(tmp_path / "hf" / WEIGHTS_FILE)["transformer.h.0.mlp.c_fc.weight"]
    assert torch.equal(found, expected)
