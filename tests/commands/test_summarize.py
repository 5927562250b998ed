"""Tests of the summary program as a user starts it."""

import os
import shlex
import subprocess
from pathlib import Path

from support.warm_python import TOOLS, warm_python

from megazero.checkpoint.runs import RunIdentity, write_run
from megazero.report.metrics import Evaluation
from megazero.report.metrics_file import MetricsFile

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [warm_python(TOOLS), ROOT / "tools" / "summarize_run.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_it_tells_figures_and_places(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file.evaluation(Evaluation(0, 0, "validation", loss=7.5))
    file.close()
    done = run(
        "--metrics-file", tmp_path / "m.jsonl", "--load", tmp_path / "none", "--tensorboard-dir", tmp_path / "t b"
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["validation", "loss", "7.5000"] in lines
    assert ["bits", "per", "byte", "-"] in lines
    assert ["checkpoint", "none"] in lines
    assert not (tmp_path / "run.html").exists()
    # The command that is shown can be pasted into a shell.
    assert shlex.split(done.stdout.splitlines()[-1])[-2:] == ["--logdir", str(tmp_path / "t b")]


def test_it_writes_a_page(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "config.yaml").write_text("num_layers: 2\n")
    file = MetricsFile(tmp_path / "m.jsonl")
    file.evaluation(Evaluation(0, 0, "validation", loss=7.5))
    file.close()
    page = tmp_path / "pages" / "run.html"
    done = run("--metrics-file", tmp_path / "m.jsonl", "--load", tmp_path / "saved", "--html", page)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["page", str(page)]
    assert "num_layers: 2" in page.read_text() and "validation loss" in page.read_text()


def test_a_run_without_a_metrics_file_is_told_how_to_have_one(tmp_path: Path) -> None:
    done = run("--load", tmp_path)
    assert done.returncode == 2
    assert "no figures of a run are here" in done.stderr and "pretrain --save" in done.stderr


def test_the_figures_of_another_run_are_refused_by_both_names(tmp_path: Path) -> None:
    """The file under --load is taken by itself, and one of another run is no part of its summary or page."""
    write_run(tmp_path, RunIdentity("0" * 16, "today", "here"))
    for name, run_id in (("curves.jsonl", "0" * 16), ("other.jsonl", "1" * 16)):
        file = MetricsFile(tmp_path / name, run=run_id)
        file.evaluation(Evaluation(0, 0, "validation", loss=7.5))
        file.close()
    assert "7.5000" in run("--load", tmp_path).stdout
    missing = run("--load", tmp_path / "none")
    assert missing.returncode == 2 and "there is no such folder" in missing.stderr
    done = run("--load", tmp_path, "--metrics-file", tmp_path / "other.jsonl", "--html", tmp_path / "page.html")
    assert done.returncode == 2 and not (tmp_path / "page.html").exists()
    assert "run 1111111111111111" in done.stderr and "run 0000000000000000" in done.stderr


def test_a_missing_file_is_told_without_a_traceback(tmp_path: Path) -> None:
    done = run("--metrics-file", tmp_path / "m.jsonl")
    assert done.returncode == 2
    assert "m.jsonl" in done.stderr and "Traceback" not in done.stderr
