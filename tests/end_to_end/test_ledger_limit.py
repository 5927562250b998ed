"""Tests --ledger-limit: a run that needs more memory ends with one message, on one process and on several."""

from pathlib import Path

import pytest
from support.launch import SMALL_RUN, command_line, read_steps, run_here, run_torchrun, set_launcher

TOLD = ("memory limit exceeded: ", " MiB alive", "rule:  --ledger-limit ", "legal: a smaller --micro-batch-size")


def is_told_once(stderr: str) -> bool:
    return all(stderr.count(part) == 1 for part in TOLD)


def flags(folder: Path, **changes: str | None) -> list[str]:
    named = {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    records = {"--metrics-file": str(folder / "steps.jsonl"), "--log-interval": "1"}
    return command_line({**SMALL_RUN, "--device": "cpu", **records, **named})


def test_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The peak that the ledger reports for a run is a sufficient limit for it; a little less is not."""
    set_launcher(monkeypatch)
    assert run_here(flags(tmp_path, ledger=""), monkeypatch) == 0
    peak = max(record["ranks"][0]["ledger"]["peak_bytes"] for record in read_steps(tmp_path / "steps.jsonl").values())
    for name, limit, code in (("enough", peak, 0), ("short", 0.95 * peak, 3), ("nothing", 1000, 3)):
        folder = tmp_path / name
        folder.mkdir()
        capsys.readouterr()
        assert run_here(flags(folder, ledger_limit=str(limit / 2**20)), monkeypatch) == code
        stderr = capsys.readouterr().err
        assert "Traceback" not in stderr
        steps = read_steps(folder / "steps.jsonl")
        if code == 0:
            assert stderr == "" and steps[4]["ranks"][0]["ledger"]["peak_bytes"] <= limit
        else:
            assert stderr.count("memory limit exceeded") == 1 and len(steps) < 4


@pytest.mark.gloo
@pytest.mark.parametrize(("limit", "phase"), [("1.8", "forward"), ("3.3", "backward")])
def test_every_rank_of_a_job_finds_it(limit: str, phase: str, tmp_path: Path) -> None:
    """The limit is exceeded in the middle of a step, in backward with reductions in flight; a step takes 3.6 MiB."""
    wide = {"hidden_size": "64", "micro_batch_size": "8", "global_batch_size": "32", "zero_stage": "2"}
    finished = run_torchrun(flags(tmp_path, ledger_limit=limit, **wide), ranks=2, folder=tmp_path)
    assert finished.code == 1, finished.stdout  # torchrun's exit code for any failure
    assert is_told_once(finished.stderr) and f"alive in {phase}: " in finished.stderr, finished.stderr
    assert 'pretrain_gpt.py", line' not in finished.stderr and "Traceback" not in finished.stdout
    assert read_steps(tmp_path / "steps.jsonl") == {}
