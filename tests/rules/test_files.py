"""Tests of the rules between settings that name data, tokenizers, checkpoints and reports."""

import os
from pathlib import Path
from typing import Any

import pytest
from support.configs import make_run
from support.each import each

from megazero.rules.files import split_shares
from megazero.rules.run import check

OWN: dict[str, Any] = {"mock_data": False, "train_data_path": "a", "valid_data_path": ["b"]}
CORPUS: dict[str, Any] = {"mock_data": False, "data_path": ["corpus"]}


def given(**settings: Any) -> list[str]:
    return [problem.given for problem in check(make_run(**settings), 1)]


@each(
    ("settings", "expected"),
    [
        ({"data_path": ["corpus"]}, ["--mock-data and --data-path corpus"]),
        ({"mock_data": False}, ["neither --data-path nor --mock-data"]),
        (OWN, []),
        (OWN | {"test_data_path": "t"}, []),
        (OWN | {"valid_data_path": [], "eval_iters": 0}, []),
        (OWN | {"valid_data_path": []}, ["--train-data-path with --eval-iters 100"]),
        (OWN | {"data_path": "c"}, ["--data-path c and --train-data-path, --valid-data-path"]),
        (OWN | {"mock_data": True}, ["--mock-data and --train-data-path a --valid-data-path b"]),
        (
            {"mock_data": False, "valid_data_path": "b", "test_data_path": "c"},
            ["--valid-data-path, --test-data-path without --train-data-path"],
        ),
        (
            {"mock_data": False, "data_path": "d", "split": "9,1", "valid_data_path": ["0", "b"]},
            [
                "--data-path d and --valid-data-path",
                "--valid-data-path without --train-data-path",
                "--valid-data-path 0 b",
            ],
        ),
        (
            OWN | {"train_data_path": ["0.5", "a", "b"], "valid_data_path": ["0.3", "a", "0.7", "b"]},
            ["--train-data-path 0.5 a b"],
        ),
        ({"data_skip_samples": ["0-0", "1-5", "100-199"]}, []),
        ({"data_skip_samples": "7-9"}, []),
        (
            {"data_skip_samples": ["5", "9-7", "a-b", "-3-4", "1-2-3", "1.0-2"]},
            [f"--data-skip-samples {word}" for word in ("5", "9-7", "a-b", "-3-4", "1-2-3", "1.0-2")],
        ),
        (
            {"data_skip_samples": ["10-20", "20-30", "5-6", "31-40"]},
            ["--data-skip-samples 20-30 after sample 20", "--data-skip-samples 5-6 after sample 30"],
        ),
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
        (CORPUS | {"split": "100"}, []),
        (CORPUS | {"split": "0,100", "eval_iters": 0}, ["--split 0,100"]),
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
        ({"finetune": True}, ["--finetune without --load"]),
        ({"finetune": True, "load": "/nonexistent"}, []),
        ({"keep_every": 20, "save_interval": 10}, []),
        ({"keep_every": 20}, []),
        ({"keep_every": 25, "save_interval": 10}, ["--keep-every 25 with --save-interval 10"]),
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
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    (tmp_path / "link").symlink_to(tmp_path)
    assert given(save=loop, load=tmp_path / "link") == [f"--save {loop}"]
    assert given(ledger_dir=tmp_path, pipeline_trace_dir=tmp_path / "later") == []
    assert given(save=tmp_path, load=tmp_path / "later", metrics_file=file, tokenizer_model=file) == []


def test_places_for_reports_can_be_written(tmp_path: Path) -> None:
    """A process of another user finds what it may not write; root may write everywhere."""
    (tmp_path / "file").write_text("")
    below = {"tensorboard_dir": tmp_path / "file" / "a" / "b", "save": tmp_path / "file" / "c"}
    assert given(**below) == [f"--save {tmp_path}/file/c", f"--tensorboard-dir {tmp_path}/file/a/b"]
    places: dict[str, Any] = {"tensorboard_dir": "/board", "metrics_file": "/steps", "save": "/saved"}
    child = os.fork()
    if child == 0:
        if os.geteuid() == 0:
            os.setuid(65534)
        refused = given(**places)
        os._exit(0 if refused == ["--save /saved", "--tensorboard-dir /board", "--metrics-file /steps"] else 1)
    assert os.waitpid(child, 0)[1] == 0


@each(
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
