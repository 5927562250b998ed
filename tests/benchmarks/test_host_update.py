"""Tests of the benchmark of the host's update: its figures, and the program, small."""

import json
from pathlib import Path

import pytest
from host_update import main, rates, systems


def test_the_share_is_of_the_better_loop() -> None:
    found = {2: {2048: {"bf16": 2e9, "fp32": 6e9, "copy": 1e9, "sum": 4e9}}}
    rows = systems(found)
    assert rows["2 threads, 2 Ki, bf16"]["share_of_bandwidth"] == 0.5
    assert rows["2 threads, 2 Ki, fp32"]["share_of_bandwidth"] == 1.5
    assert rows["2 threads, 2 Ki, bf16"]["median_step_seconds"] == pytest.approx(2048 * 26 / 2e9)


def test_sub_groups_of_a_state_are_updated_in_turn() -> None:
    assert rates(16, 4, 0.0).keys() == {"bf16", "fp32", "copy", "sum"}


@pytest.mark.gloo
def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["host_update.py"])
    words = [
        "--sizes",
        "64",
        "4096",
        "--threads",
        "1",
        "--budget",
        "0",
        "--state",
        "8192",
        "--output",
        str(tmp_path / "out.md"),
    ]
    assert main(words) == 0
    page, record = (tmp_path / "out.md").read_text(), json.loads((tmp_path / "out.json").read_text())
    assert capsys.readouterr().out == page
    assert list(record["systems"]) == [
        f"1 thread, {size}, {dtype}" for size in ("0.0625 Ki", "4 Ki") for dtype in ("bf16", "fp32")
    ]
    assert all(row["update_bytes_per_second"] > 0 for row in record["systems"].values())
