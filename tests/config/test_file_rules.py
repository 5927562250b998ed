"""Rules between settings that name data, tokenizers, checkpoints and reports."""

from pathlib import Path
from typing import Any

import pytest
from support.configs import make_run

from megazero.config.file_rules import split_shares
from megazero.config.rules import check

CORPUS: dict[str, Any] = {"mock_data": False, "data_path": ["corpus"]}


def given(**settings: Any) -> list[str]:
    return [problem.given for problem in check(make_run(**settings), 1)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"data_path": ["corpus"]}, ["--mock-data and --data-path corpus"]),
        ({"mock_data": False}, ["neither --data-path nor --mock-data"]),
        ({"vocab_size": None}, ["--mock-data without --vocab-size"]),
        ({"mock_data": False, "data_path": ["a", "b", "runs/c"]}, []),
        ({"mock_data": False, "data_path": ["1/3", "a", "2/3", "b"]}, []),
        ({"mock_data": False, "data_path": ["0.5", "a", "b", "c"]}, ["--data-path 0.5 a b c"]),
        ({"mock_data": False, "data_path": ["0.5", "a", "0.5"]}, ["--data-path 0.5 a 0.5"]),
        ({"mock_data": False, "data_path": ["0", "a", "1", "b"]}, ["--data-path 0 a 1 b"]),
        ({"mock_data": False, "data_path": ["nan", "a"]}, ["--data-path nan a"]),
        ({"mock_data": False, "data_path": ["0.7", "a", "0.3", "b"]}, []),
        (CORPUS | {"split": "all"}, ["--split all"]),
        (CORPUS | {"split": "0,1,0"}, ["--split 0,1,0"]),
        (CORPUS | {"split": "100"}, ["--split 100 with --eval-iters 100"]),
        (CORPUS | {"split": "100", "eval_iters": 0}, []),
        (
            {"tokenizer_type": "GPT2BPETokenizer"},
            [
                "--tokenizer-type GPT2BPETokenizer without --vocab-file",
                "--tokenizer-type GPT2BPETokenizer without --merge-file",
            ],
        ),
        (
            {"tokenizer_type": "SentencePieceTokenizer"},
            ["--tokenizer-type SentencePieceTokenizer without --tokenizer-model"],
        ),
        ({"tokenizer_type": "ByteTokenizer", "vocab_size": None}, []),
        ({"vocab_file": "/nonexistent/vocab.json"}, ["--vocab-file /nonexistent/vocab.json"]),
        ({"save_interval": 5}, ["--save-interval 5 without --save"]),
        ({"no_save_optim": True}, ["--no-save-optim without --save"]),
        ({"finetune": True, "no_load_optim": True}, ["--finetune without --load", "--no-load-optim without --load"]),
        (
            {"use_checkpoint_opt_param_scheduler": True},
            ["--use-checkpoint-opt-param-scheduler without --load"],
        ),
        ({"log_memory_to_tensorboard": True}, ["--log-memory-to-tensorboard without --tensorboard-dir"]),
        ({"log_memory_to_tensorboard": True, "tensorboard_dir": "/nonexistent"}, []),
    ],
)
def test_a_broken_rule(settings: dict[str, Any], expected: list[str]) -> None:
    assert given(**settings) == expected


def test_files_are_not_folders_and_folders_not_files(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    reports = {"tensorboard_dir": file, "ledger_dir": file, "pipeline_trace_dir": file, "metrics_file": tmp_path}
    assert given(save=file, load=file, **reports) == [
        f"--save {file}",
        f"--load {file}",
        f"--tensorboard-dir {file}",
        f"--ledger-dir {file}",
        f"--pipeline-trace-dir {file}",
        f"--metrics-file {tmp_path}",
    ]
    assert given(ledger_dir=tmp_path, pipeline_trace_dir=tmp_path / "later") == []
    assert given(save=tmp_path, load=tmp_path / "later", metrics_file=file, tokenizer_model=file) == []


@pytest.mark.parametrize(
    ("split", "shares"),
    [
        ("969,30,1", (0.969, 0.03, 0.001)),
        ("969, 30, 1", (0.969, 0.03, 0.001)),
        ("0.9/0.1", (0.9, 0.1, 0.0)),
        ("100", (1.0, 0.0, 0.0)),
        ("1,0,1", (0.5, 0.0, 0.5)),
        ("1,2,3,4", None),
        ("0,0,0", None),
        ("-1,2", None),
        ("inf,1", None),
        ("", None),
        ("1,,1", None),
    ],
)
def test_split_shares(split: str, shares: tuple[float, float, float] | None) -> None:
    found = split_shares(split)
    assert found == (None if shares is None else pytest.approx(shares))
