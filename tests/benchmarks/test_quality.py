"""Tests the benchmark of training that is not exact: the table and the picture of runs that have been made."""

import json
from pathlib import Path

import quality


def write_run(path: Path, losses: list[float], validations: dict[int, float]) -> None:
    figures = {"step_seconds": 0.1, "skipped": 0, "tokens_per_second": 80.0, "lr": 1e-3, "grad_norm": 1.0}
    lines = [{"iteration": step, "loss": loss, **figures} for step, loss in enumerate(losses, start=1)]
    found = [
        {"evaluation": {"iteration": step, "split": "validation", "loss": loss, "perplexity": 1.0, "tokens": 9}}
        for step, loss in validations.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *found]))


def test_differences_are_to_the_first_variant(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    write_run(folder / "exact.jsonl", [5.0 - step / 60 for step in range(60)], {30: 4.6, 60: 4.25})
    write_run(folder / "gradients-4.jsonl", [5.0 - step / 70 for step in range(60)], {30: 4.7, 60: 4.5})
    words = ["--data-path", "unused", "--variants", "exact", "gradients 4", "--steps", "60", "--eval-interval", "30"]
    page = tmp_path / "page.md"
    assert quality.main([*words, "--folder", str(folder), "--output", str(page)]) == 0
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert [cell.strip() for cell in rows[2].split("|")][1:4] == ["exact", "4.6000", "4.2500"]
    assert rows[3].split("|")[1].strip() == "gradients 4" and "+0.2500" in rows[3] and "+28.40" in rows[3]
    drawn = page.with_suffix(".svg").read_text()
    assert "gradients 4" in drawn and drawn.startswith("<svg")
