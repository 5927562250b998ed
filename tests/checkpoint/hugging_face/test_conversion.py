"""Tests of export and import against transformers: the logits are the same, and a failure leaves no partial files."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import reference
from support.checkpoints import run_config, save_checkpoint
from support.models import small_config

from megazero.checkpoint.hugging_face.conversion import CONFIG_FILE, WEIGHTS_FILE, export_model, read_model
from megazero.checkpoint.reader import open_checkpoint
from megazero.errors import CheckpointError

VOCAB = 101
IDS = torch.tensor([[3, 77, 100, 0, 12]])
THEIRS = {"n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 8, "vocab_size": 17}


def exported(folder: Path, *, tp: int = 1, dtype: torch.dtype | None = None, **changes: object) -> tuple[Path, dict]:
    """Save a checkpoint at tensor-parallel degree `tp` and export it; return the output folder and the full weights."""
    model = small_config(**{"init_method_std": 0.2, **changes})
    weights = save_checkpoint(folder / "run", run_config(model), vocab_size=VOCAB, tp=tp)
    export_model(open_checkpoint(folder / "run"), model, folder / "hf", dtype=dtype, eod=5)
    return folder / "hf", weights


def their_model(folder: Path, **changes: object) -> Any:
    transformers = pytest.importorskip("transformers")  # too slow to import while tests are collected
    torch.manual_seed(2)
    config = transformers.GPT2Config(**{**THEIRS, **changes}, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # biases and norms too
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("tp", "changes"),
    [(1, {}), (4, {}), (2, {"untie_embeddings_and_output_weights": True}), (2, {"ffn_hidden_size": 36})],
)
def test_transformers_gives_the_references_logits(tmp_path: Path, tp: int, changes: dict[str, object]) -> None:
    transformers = pytest.importorskip("transformers")
    folder, weights = exported(tmp_path, tp=tp, norm_epsilon=1e-3, **changes)
    for loader in (transformers.GPT2LMHeadModel, transformers.AutoModelForCausalLM):
        theirs = loader.from_pretrained(folder, dtype=torch.float64).eval()
        expected = reference.logits(weights, IDS, reference.Shape(epsilon=1e-3))
        torch.testing.assert_close(theirs(IDS).logits.detach(), expected, rtol=1e-10, atol=1e-11)
    assert theirs.config.eos_token_id == 5


def test_the_number_format_can_be_chosen(tmp_path: Path) -> None:
    folder, weights = exported(tmp_path, dtype=torch.bfloat16)
    stored = load_file(folder / WEIGHTS_FILE)
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert torch.equal(stored["transformer.wte.weight"], weights["embedding.word.weight"].bfloat16())
    assert json.loads((folder / CONFIG_FILE).read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"n_inner": 20}])
def test_import_gives_transformers_logits(tmp_path: Path, changes: dict[str, object]) -> None:
    theirs = their_model(tmp_path, **changes)
    ours = read_model(tmp_path)
    ids = IDS % 17
    weights = {name: value.double() for name, value in ours.weights.items()}
    expected = theirs.double()(ids).logits.detach()
    torch.testing.assert_close(reference.logits(weights, ids), expected, rtol=1e-10, atol=1e-11)
    assert ours.vocab_size == 17 and ours.config.seq_length == 8


def test_import_takes_files_without_prefix_and_with_buffers(tmp_path: Path) -> None:
    their_model(tmp_path)
    expected = read_model(tmp_path).weights
    bare = {name.removeprefix("transformer."): value for name, value in load_file(tmp_path / WEIGHTS_FILE).items()}
    save_file({**bare, "h.0.attn.bias": torch.ones(1, 1, 8, 8)}, tmp_path / WEIGHTS_FILE)
    found = read_model(tmp_path).weights
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_an_existing_model_is_not_overwritten(tmp_path: Path) -> None:
    folder, _ = exported(tmp_path)
    before = (folder / WEIGHTS_FILE).read_bytes()
    with pytest.raises(CheckpointError, match="must not exist yet"):
        export_model(open_checkpoint(tmp_path / "run"), small_config(), folder)
    assert (folder / WEIGHTS_FILE).read_bytes() == before


def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    save_checkpoint(tmp_path / "run", run_config(small_config()), vocab_size=VOCAB, tp=1)
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(CheckpointError, match="No space left"):
        export_model(open_checkpoint(tmp_path / "run"), small_config(), tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_file_in_the_way_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "hf").write_text("")
    model = small_config()
    save_checkpoint(tmp_path / "run", run_config(model), vocab_size=VOCAB, tp=1)
    with pytest.raises(CheckpointError, match="must be writable"):
        export_model(open_checkpoint(tmp_path / "run"), model, tmp_path / "hf" / "below")


def test_import_tells_all_that_does_not_fit(tmp_path: Path) -> None:
    their_model(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    del tensors["transformer.ln_f.bias"]
    tensors["transformer.wpe.weight"] = torch.zeros(5, 12)
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    with pytest.raises(CheckpointError) as caught:
        read_model(tmp_path)
    told = [problem.given.split(": ")[1] for problem in caught.value.problems]
    assert told == ["transformer.wpe.weight has shape [5, 12]", "transformer.ln_f.bias is missing"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "relu"}, "activation_function 'relu'"),
        ({"model_type": "opt"}, "model_type 'opt'"),
        ({"n_layer": None}, "num_layers None"),
        ({"n_head": 5}, "width 12, 5 heads"),
        ({"n_layer": 10**7}, "10000000 layers\n.*tensors for every layer"),
        ({"n_layer": 2**60}, "n_layer 1152921504606846976\n.*is below"),
        ({"vocab_size": 10**4000}, "vocab_size 1000.*\n.*is below"),
        ({"resid_pdrop": 2.0}, "hidden_dropout 2.0"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    their_model(tmp_path)
    described = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**described, **changes}))
    with pytest.raises(CheckpointError, match=message):
        read_model(tmp_path)


def test_missing_and_broken_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model(tmp_path)
    their_model(tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes(b"not a tensor file")
    with pytest.raises(CheckpointError, match="must be a safetensors file"):
        read_model(tmp_path)
