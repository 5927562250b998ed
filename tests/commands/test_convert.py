"""Exporting a checkpoint to Hugging Face's format and importing it, by the programs, gives the same checkpoint."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.checkpoints import run_config, save_checkpoint
from support.launch import load_program
from support.models import small_config

from megazero.checkpoint.reader import open_checkpoint
from megazero.checkpoint.state import TrainState
from megazero.command_line.parse import from_yaml
from megazero.config.run import DataConfig
from megazero.data.tokenizers import JsonTokenizer
from megazero.errors import CheckpointError, DataError

TOOL = Path(__file__).parents[2] / "tools" / "convert_hf.py"
Main = Callable[[list[str]], None]


@pytest.fixture(scope="module")
def main() -> Main:
    found: Main = load_program(TOOL).main
    return found


def test_there_and_back(tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    config = run_config(small_config(norm_epsilon=1e-4), data=DataConfig(tokenizer_type="ByteTokenizer"))
    weights = save_checkpoint(tmp_path / "run", config, vocab_size=257, tp=4)
    main(["export", "--load", str(tmp_path / "run"), "--output", str(tmp_path / "hf"), "--dtype", "float32"])
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 256
    written = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert written == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    main(["import", "--input", str(tmp_path / "hf"), "--save", str(tmp_path / "back")])
    assert "step 7" in capsys.readouterr().out
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "hf").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]
    back = open_checkpoint(tmp_path / "back")
    assert back.parameters.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(back.read_full(name), value.float()), name
    model = from_yaml(back.config_yaml).model
    assert (model.num_layers, model.hidden_size, model.vocab_size, model.norm_epsilon) == (3, 60, 257, 1e-4)
    assert TrainState.from_json(back.progress, step=0).iteration == 0
    data = from_yaml(back.config_yaml).data
    assert data.tokenizer_type == "HuggingFaceTokenizer" and data.tokenizer_model == tmp_path / "back" / "tokenizer"
    main(["export", "--load", str(tmp_path / "back"), "--output", str(tmp_path / "again")])
    first, again = (JsonTokenizer(tmp_path / folder / "tokenizer.json") for folder in ("hf", "again"))
    assert again.encode("naïve\n") == first.encode("naïve\n") == [*"naïve\n".encode()] and again.eod == first.eod == 256


def test_a_model_whose_tokenizer_is_of_no_use_is_imported_without(
    tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(small_config(), data=DataConfig(tokenizer_type="ByteTokenizer"))
    save_checkpoint(tmp_path / "run", config, vocab_size=257, tp=1)
    main(["export", "--load", str(tmp_path / "run"), "--output", str(tmp_path / "hf")])
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    main(["import", "--input", str(tmp_path / "hf"), "--save", str(tmp_path / "broken")])
    (tmp_path / "hf" / "tokenizer.json").unlink()
    main(["import", "--input", str(tmp_path / "hf"), "--save", str(tmp_path / "without")])
    assert capsys.readouterr().out.count("no tokenizer: ") == 2
    for name in ("broken", "without"):
        assert not (tmp_path / name / "tokenizer").exists()
        assert from_yaml(open_checkpoint(tmp_path / name).config_yaml).data.tokenizer_type is None


def test_a_lost_tokenizer_stops_no_export(tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    data = DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=tmp_path / "gone.model")
    save_checkpoint(tmp_path / "run", run_config(small_config(), data=data), vocab_size=257, tp=1)
    command = ["export", "--load", str(tmp_path / "run"), "--output"]
    main([*command, str(tmp_path / "hf")])
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] is None
    assert "no tokenizer: --tokenizer-model" in capsys.readouterr().out
    main([*command, str(tmp_path / "other"), "--tokenizer-type", "ByteTokenizer"])
    assert (tmp_path / "other" / "tokenizer.json").is_file()
    with pytest.raises(DataError, match="must be a file"):
        main([*command, str(tmp_path / "none"), "--tokenizer-type", "SentencePieceTokenizer"])
    assert not (tmp_path / "none").exists()


def test_nothing_to_export(tmp_path: Path, main: Main) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        main(["export", "--load", str(tmp_path / "run"), "--output", str(tmp_path / "hf")])


def test_the_program_prints_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", [str(TOOL), *["import", "--input", str(tmp_path), "--save", str(tmp_path / "run")]]
    )
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(TOOL), run_name="__main__")
    assert ended.value.code == 2
    assert "config.json" in capsys.readouterr().err


def test_a_model_is_not_imported_into_a_run_that_has_begun(tmp_path: Path, main: Main) -> None:
    save_checkpoint(tmp_path / "run", run_config(small_config()), vocab_size=50, tp=1)
    main(["export", "--load", str(tmp_path / "run"), "--output", str(tmp_path / "hf")])
    with pytest.raises(CheckpointError, match="step 0 of a new run"):
        main(["import", "--input", str(tmp_path / "hf"), "--save", str(tmp_path / "run")])
