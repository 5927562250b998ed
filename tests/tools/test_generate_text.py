"""The program itself, on checkpoints of tensor-parallel runs."""

import importlib.util
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpoints import run_config, save_checkpoint
from support.models import small_config

from megazero.config.data import DataConfig
from megazero.errors import CheckpointError, ConfigError, DataError, UserError

TOOL = Path(__file__).parents[2] / "tools" / "generate_text.py"
BYTES = DataConfig(tokenizer_type="ByteTokenizer")
FAST = ["--device", "cpu", "--max-new-tokens", "6"]
Main = Callable[[list[str]], None]


@pytest.fixture(scope="module")
def main() -> Main:
    spec = importlib.util.spec_from_file_location("generate_text", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Main = module.main
    return found


def save(folder: Path, *, data: DataConfig = BYTES, vocab_size: int = 257, tp: int = 2) -> str:
    config = run_config(small_config(init_method_std=0.3), data=data)
    save_checkpoint(folder, config, vocab_size=vocab_size, tp=tp)
    return str(folder)


def output(main: Main, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main([*arguments, *FAST])
    return capsys.readouterr().out


def test_it_continues_the_prompt_whatever_the_layout(
    tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [
        output(main, capsys, "--load", save(tmp_path / str(tp), tp=tp), "--prompt", "def f(", "--greedy")
        for tp in (1, 2, 3)
    ]
    assert texts[0].startswith("def f(") and len(texts[0]) > len("def f(\n")
    assert texts[1:] == texts[:1] * 2


def test_several_samples_repeat_by_seed(tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path)
    once, again, other = (
        output(main, capsys, "--load", folder, "--num-samples", "2", "--top-k", "50", "--seed", seed)
        for seed in ("1", "1", "2")
    )
    assert once == again != other
    assert once.startswith("--- sample 1 of 2\n") and "--- sample 2 of 2\n" in once


def test_flags_name_the_tokenizer_that_the_run_does_not(
    tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path, data=DataConfig(data_path=("corpus",)))
    with pytest.raises(ConfigError, match="names no tokenizer"):
        main(["--load", folder])
    assert output(main, capsys, "--load", folder, "--tokenizer-type", "ByteTokenizer", "--prompt", "x").startswith("x")


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["--max-new-tokens", "0", "--num-samples", "-1"], ConfigError, r"--max-new-tokens 0(.|\n)*--num-samples -1"),
        (["--temperature", "-2"], ConfigError, "--temperature -2"),
        (["--step", "8"], CheckpointError, "step 8"),
        (["--seed", "-1"], ConfigError, "--seed -1"),
        (["--seed", "18446744073709551616"], ConfigError, "--seed 18446744073709551616"),
        (["--prompt", "a\udcff"], ConfigError, "--prompt"),
        (["--tokenizer-type", "SentencePieceTokenizer"], DataError, "--tokenizer-model"),
    ],
)
def test_bad_flags(tmp_path: Path, main: Main, arguments: list[str], kind: type[UserError], message: str) -> None:
    with pytest.raises(kind, match=message):
        main(["--load", save(tmp_path), *arguments])


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path: Path, main: Main) -> None:
    with pytest.raises(CheckpointError, match="tokenizer of 257 ids for a model of 100"):
        main(["--load", save(tmp_path, vocab_size=100)])


def test_the_program_prints_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(TOOL), *["--load", str(tmp_path / "nothing")]])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(TOOL), run_name="__main__")
    assert ended.value.code == 2
    assert "no such folder" in capsys.readouterr().err
