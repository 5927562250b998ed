"""The pictures of README.md are drawn, here of a tiny model and a short run, as well-formed files in both schemes."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from pictures import main
from support.step_metrics import make_step

from megazero.report.metrics_file import MetricsFile

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


def texts(file: Path) -> list[str]:
    return [each.text or "" for each in ElementTree.parse(file).iter() if each.tag.endswith("text")]


def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = MetricsFile(tmp_path / "m.jsonl")
    for iteration in (1, 2, 3):
        metrics.step(make_step(iteration, loss=1.0 / iteration), [])
    metrics.close()
    words = ["--small", "--metrics-file", str(tmp_path / "m.jsonl"), "--output", str(tmp_path / "drawn")]
    assert main(words) == 0
    drawn = {file.name: file for file in (tmp_path / "drawn").iterdir()}
    assert sorted(drawn) == sorted(file.name for file in PICTURES.iterdir()) and len(drawn) == 3
    # Each stage of ZeRO keeps less than the one before, whatever else a step needs.
    peaks = [text.partition("peak ")[2] for text in texts(drawn["memory-by-stage.svg"]) if text.startswith("stage ")]
    assert len(set(peaks)) == len(peaks) == 4
    assert texts(drawn["layout.svg"]) == texts(PICTURES / "layout.svg")
    assert "Loss, nats per token" in texts(drawn["loss.svg"])
    for file in (*drawn.values(), *PICTURES.iterdir()):
        assert "prefers-color-scheme: dark" in file.read_text() and len(file.read_bytes()) < 80_000
