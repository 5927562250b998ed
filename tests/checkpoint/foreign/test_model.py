"""Tests of importing Megatron-LM's and DeepSpeed's checkpoints: in every layout the model is the one that was cut."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from support import foreign_files as files
from support.each import each
from support.foreign_files import VOCABULARY, Megatron

from megazero.checkpoint.foreign.model import find_foreign, read_foreign
from megazero.checkpoint.hugging_face.families import family_of
from megazero.checkpoint.reader import open_checkpoint
from megazero.commands.convert import main
from megazero.errors import CheckpointError

Write = Callable[[Path, Megatron], Path]
MODELS = {"llama": files.llama(), "gpt2": files.gpt2(), "bloom": files.bloom()}


def as_transformers(folder: Path) -> dict[str, torch.Tensor]:
    """Read a checkpoint, and return the tensors as transformers has them."""
    found = read_foreign(folder, vocab_size=VOCABULARY)
    weights = found.states["weight"]
    return {
        name: value
        for row in family_of(found.config).rows(weights.shapes)
        for name, value in zip(row.theirs, row.form.to_theirs([weights[ours] for ours in row.ours]), strict=True)
    }


@each(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"tp": 2, "pp": 2, "chunks": 2}),
        ("llama", {"tp": 4}),  # more ranks than groups
        ("gpt2", {"tp": 2, "name_of": files.old_name}),
        ("gpt2", {"tp": 2, "version": 1.0, "name_of": files.old_name}),
        ("gpt2", {"tp": 2, "pp": 4, "version": 0, "name_of": files.old_name}),
        ("gpt2", {"pp": 2, "name_of": files.engine_name}),
        ("bloom", {"tp": 2, "name_of": files.old_name}),
    ],
)
def test_legacy(tmp_path_factory: pytest.TempPathFactory, kind: str, options: dict[str, Any]) -> None:
    root, model = tmp_path_factory.mktemp("legacy"), MODELS[kind]
    assert_same(as_transformers(files.write_legacy(root, model, **options)), model.theirs)


@each(
    ("kind", "options"),
    [
        ("llama", {"tp": 2}),
        ("llama", {"stacked": False, "name_of": files.engine_name}),
        ("gpt2", {"tp": 4, "name_of": files.engine_name}),
    ],
)
def test_torch_dist(tmp_path_factory: pytest.TempPathFactory, kind: str, options: dict[str, Any]) -> None:
    root, model = tmp_path_factory.mktemp("dist"), MODELS[kind]
    assert_same(as_transformers(files.write_torch_dist(root, model, **options)), model.theirs)


@each(
    ("kind", "options"),
    [
        ("gpt2", {}),
        ("llama", {"flat": True}),
        ("bloom", {"name_of": files.pipeline_name}),
        ("bloom", {"with_moments": False}),
    ],
)
def test_universal(tmp_path_factory: pytest.TempPathFactory, kind: str, options: dict[str, Any]) -> None:
    root, model = tmp_path_factory.mktemp("universal"), MODELS[kind]
    assert_same(as_transformers(files.write_universal(root, model, **options)), model.theirs)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_that_torch_itself_has_written(tmp_path: Path) -> None:
    """The table of chunks is as torch.distributed.checkpoint writes it."""
    model, folder = MODELS["gpt2"], tmp_path / "iter_0000003"
    torch.distributed.checkpoint.save(dict(model.tensors), checkpoint_id=folder, no_dist=True)
    torch.save({"args": argparse.Namespace(**model.arguments), "iteration": 3}, folder / "common.pt")
    assert_same(as_transformers(folder), model.theirs)


def test_damaged_tables_of_chunks_are_told(tmp_path: Path) -> None:
    folder = files.write_torch_dist(tmp_path, MODELS["gpt2"], tp=2)
    table = (folder / ".metadata").read_bytes()
    for old, new, message in (
        (b"__0_0.distcp", b"../../distcp", "no file of the folder"),
        (b"__0_0.distcp", b"__7_0.distcp", "No such file"),
        (b"chunks", b"chunkz", "missing|fill a tensor"),
        (b"storage_data", b"storage_dada", "the table of a torch_dist checkpoint"),
    ):
        (folder / ".metadata").write_bytes(table.replace(old, new))
        with pytest.raises(CheckpointError, match=message):
            as_transformers(folder)


def test_halves_of_swiglu_of_their_own(tmp_path: Path) -> None:
    model = MODELS["llama"]
    tensors = dict(model.tensors)
    for name in [name for name in tensors if name.endswith("linear_fc1.weight")]:
        tensors |= dict(zip((f"{name}_w", f"{name}_v"), tensors.pop(name).chunk(2), strict=True))
    masters = {name: value.clone() for name, value in tensors.items()}
    cut = model._replace(tensors={name: value.bfloat16() for name, value in tensors.items()})
    folder = files.write_torch_dist(tmp_path, cut, stacked=False, states={"fp32_param": masters})
    assert_same(as_transformers(folder), model.theirs)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def dist_with_moments(root: Path, model: Megatron) -> Path:
    """Write master weights too, which differ from the model's, as those of a training in bf16 do."""
    states = {"fp32_param": model.tensors, **files.moments(model)}
    rounded = {name: value.bfloat16() for name, value in model.tensors.items()}
    return files.write_torch_dist(root, model._replace(tensors=rounded), states=states, tp=2)


@each("write", [files.write_universal, dist_with_moments])
def test_the_optimizers_states_come_too(tmp_path_factory: pytest.TempPathFactory, write: Write) -> None:
    root, model = tmp_path_factory.mktemp("states"), MODELS["llama"]
    write(root, model)
    main(["import", "--input", str(root), "--save", str(root / "run"), "--vocab-size", str(VOCABULARY)])
    checkpoint = open_checkpoint(root / "run")
    weights = read_foreign(files.write_legacy(root / "plain", model), vocab_size=VOCABULARY).states["weight"]
    for name, weight in weights.items():
        first = weight * 0.5 + 0.1
        assert torch.equal(checkpoint.read_full(name), weight), name
        assert torch.equal(checkpoint.read_full(name, "exp_avg"), first), name
        assert torch.equal(checkpoint.read_full(name, "exp_avg_sq"), first**2), name
    progress = checkpoint.progress
    assert (checkpoint.step, progress["consumed_samples"], progress["seed"]) == (files.STEP, files.SAMPLES, files.SEED)


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    """The exported model and transformers' own, of the tensors that Megatron's were made of, agree in float64."""
    transformers = pytest.importorskip("transformers")
    model = MODELS["llama"]
    files.write_legacy(tmp_path, model, tp=2, pp=2)
    main(["import", "--input", str(tmp_path), "--save", str(tmp_path / "run"), "--vocab-size", str(VOCABULARY)])
    main(["export", "--load", str(tmp_path / "run"), "--output", str(tmp_path / "hf")])
    described = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=files.HIDDEN,
        num_hidden_layers=files.LAYERS,
        num_attention_heads=files.HEADS,
        num_key_value_heads=files.GROUPS,
        intermediate_size=files.INNER,
        max_position_embeddings=files.POSITIONS,
        tie_word_embeddings=False,
    )
    reference = transformers.LlamaForCausalLM(described).double()
    reference.load_state_dict({name: value.double() for name, value in model.theirs.items()})
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    ids = torch.tensor([[3, 77, 89, 0, 12]])
    torch.testing.assert_close(found(ids).logits, reference(ids).logits, rtol=1e-12, atol=1e-12)


def test_padding_stays_where_nothing_is_said(tmp_path: Path) -> None:
    model = read_foreign(files.write_legacy(tmp_path, MODELS["gpt2"], tp=2))
    assert model.vocab_size == model.config.vocab_size == files.PADDED
    assert torch.equal(
        model.states["weight"]["embedding.word.weight"], MODELS["gpt2"].tensors["embedding.word_embeddings.weight"]
    )
    with pytest.raises(CheckpointError, match="an embedding of 96 rows"):
        read_foreign(tmp_path / "iter_0000003", vocab_size=97)


@each(
    ("change", "message"),
    [
        ({"num_experts": 8}, "num_experts 8"),
        ({"multi_latent_attention": True}, "multi_latent_attention True"),
        ({"rotary_interleaved": True}, "rotary_interleaved True"),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p True"),
        ({"num_layers": None}, "num_layers None"),
        ({"num_layers": 2**40}, "num_layers 1099511627776"),
        ({"num_layers": 10**6}, "1000000 layers\n.*tensors for all of them"),
        ({"num_attention_heads": 5, "kv_channels": None}, "width 24, 5 heads in 5 groups"),
        ({"position_embedding_type": "relative"}, "position_embedding_type relative"),
        ({"hidden_size": 30, "kv_channels": 6}, r"word_embeddings.weight has shape \[96, 24\]"),
        ({"num_layers": 2}, "decoder.layers.2.input_layernorm.bias\n.*no such parameter"),
    ],
)
def test_what_no_model_here_has_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, change: dict[str, Any], message: str
) -> None:
    model = MODELS["gpt2"]
    model = model._replace(arguments={**model.arguments, **change})
    with pytest.raises(CheckpointError, match=message):
        read_foreign(files.write_legacy(tmp_path_factory.mktemp("refused"), model))


def test_exact_gelu_and_missing_states_are_told(tmp_path: Path) -> None:
    model = MODELS["gpt2"]
    model = model._replace(arguments={**model.arguments, "bias_gelu_fusion": False})
    gelu, states = read_foreign(files.write_legacy(tmp_path, model)).notes
    assert "exact GELU" in gelu and "weights only: legacy files" in states


def test_a_run_without_counts_begins_anew(tmp_path: Path) -> None:
    model = MODELS["gpt2"]
    model = model._replace(arguments={**model.arguments, "consumed_train_samples": None})
    folder = files.write_universal(tmp_path, model)
    with pytest.raises(CheckpointError, match="consumed_train_samples None"):
        read_foreign(folder)
    assert read_foreign(folder, with_optimizer=False).progress.iteration == 0


def test_missing_ranks_and_broken_trackers(tmp_path: Path) -> None:
    folder = files.write_legacy(tmp_path, MODELS["gpt2"], tp=2, pp=2)
    assert find_foreign(tmp_path) == folder == find_foreign(folder) and find_foreign(tmp_path / "none") is None
    (folder / "mp_rank_01_001").rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match="3 folders"):
        read_foreign(folder)
    for text in ("9", "../other", "release", ""):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
        with pytest.raises(CheckpointError, match="names a checkpoint in"):
            find_foreign(tmp_path)


def test_other_folders_are_told(tmp_path: Path) -> None:
    words = ["import", "--input", str(tmp_path), "--save", str(tmp_path / "run"), "--weights-only"]
    with pytest.raises(CheckpointError, match=r"config\.json .transformers.*\n.*ds_to_universal"):
        main(words)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="--weights-only, with --input"):
        main(words)
