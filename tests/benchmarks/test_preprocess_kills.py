"""Tests the benchmark that kills preprocessing, with a few kills."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "preprocess_kills.py"


def test_killed_preprocessing_ends_with_the_same_files(tmp_path: Path) -> None:
    """Every killed run ends with the same files when it is resumed, and a later call of the program adds trials."""
    for kills in (2, 4):
        command = [sys.executable, str(BENCHMARK), "--folder", str(tmp_path), "--kills", str(kills), "--megabytes", "6"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("same files") == 3
        assert done.stdout.splitlines()[-1].endswith(f"{kills} trials ended with the same files")
    trials = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert len(trials) == 4 and all(trial["same"] for trial in trials)
    assert any(trial["left"] for trial in trials)
