"""Tests of the page made of records: the choice of records, the tables, and that the page is up to date."""

import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import readme
from readme import FOLDER, generated, newest, records_in
from report import publish
from standings import body_of


def system(*seconds: float, **others: Any) -> dict[str, Any]:
    middle = statistics.median(seconds)
    return {
        "tokens_per_second": 512 / middle,
        "median_step_seconds": middle,
        "step_seconds": list(seconds),
        "losses": [1.0],
        "peak_bytes": 3 << 20,
        "settings": "",
        "state_bytes_per_parameter": 8.0,
        "sent_bytes": 0,
        "verdict": "agrees",
        **others,
    }


def record(**changes: Any) -> dict[str, Any]:
    found = {
        "program": "compare",
        "date": "2026-01-02",
        "device": "CPU",
        "torch": "2",
        "command": "python benchmarks/compare.py",
        "model": {"name": "8 x 256"},
        "precision": "fp32",
        "world_size": 2,
        "systems": {
            "floor": system(0.1, 0.1, 0.1),
            "ddp": system(0.1, 0.2, 0.3, state_bytes_per_parameter=16.0, sent_bytes=1 << 20),
            "megazero-2": system(0.3),
            "wrong": system(0.1, verdict="differs"),
            "deepspeed-2": {"refused": "not installed"},
        },
        "ratios": {
            "base": "ddp",
            "to_base": {"floor": 0.5, "ddp": 1.0, "megazero-2": 1.5, "wrong": None, "deepspeed-2": None},
            "to_best_peer": {"megazero-2": {"peer": "floor", "ratio": 3.0}},
        },
    }
    return {**found, **changes}


ONE = {"precision": "fp32", "matmul": {"torch": 2e12}, "copy": 3e9, "rows": 8, "flops": 2e12}


def trained() -> dict[str, Any]:
    figures = {"model_flops_per_second": 2e12, "mfu_of_measured_ceiling": 0.5, "mfu_of_data_sheet": None}
    return record(program="throughput", layout="data 2", systems={"megazero": system(0.1, 0.2, **figures)})


def kernels() -> dict[str, Any]:
    timing = {"median_step_seconds": 2e-6, "roofline_seconds": 1e-6, "share_of_roofline": 0.5, "peak_bytes": None}
    return record(program="kernels", world_size=1, systems={"GELU, forward": timing}, ceilings={"fp32": ONE})


def fill(folder: Path, **found: dict[str, Any]) -> Path:
    for name, content in found.items():
        publish([f"# {name}'s page"], folder / "results" / f"{name}.md", content)
    return folder


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]


def test_the_page_is_what_the_records_make() -> None:
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == generated(FOLDER), "run python benchmarks/readme.py"


def test_pages_name_the_machine() -> None:
    """Pages from before this was a rule may leave it out."""
    pages = [page for page in (FOLDER / "results").glob("*.md") if page.name >= "2026-11-28"]
    named = re.compile(r"\b(AMD|Intel|Apple|[AHB]\d00|null GPU)\b")
    assert pages and [page.name for page in pages if not named.search(page.read_text(encoding="utf-8"))] == []


def test_the_newest_of_a_kind_counts(tmp_path: Path) -> None:
    fill(
        tmp_path,
        a=record(date="2026-01-05"),
        b=record(date="2026-01-04"),
        c=record(date="2025-01-01", world_size=1),
        d=record(date="2025-01-01", precision="bf16"),
        e=record(date="2025-01-01", model={"name": "8 x 256", "seq_length": 3}),
        f=trained(),
        g={**trained(), "layout": "data 1 x tensor 2"},
    )
    (tmp_path / "results" / "z.json").write_text('{"measured": []}')
    assert list(newest(records_in(tmp_path / "results"))) == ["d", "c", "a", "e", "f", "g"]


def test_the_table_of_a_comparison() -> None:
    rows = {row[0]: row[1:] for row in cells(body_of(record()))}
    assert rows["ddp"] == ["200.0", "150.0 to 250.0", "1.00", "-", "2560", "3.00", "16.0", "1.00"]
    assert rows["megazero-2"][2:4] == ["1.50", "3.00 floor"] and rows["floor"][2] == "0.50"
    assert rows["wrong"][2] == "differs" and rows["deepspeed-2"] == ["not installed", *["-"] * 7]


def test_the_page(tmp_path: Path) -> None:
    fill(tmp_path, one=record(), two=trained(), three=kernels())
    (tmp_path / "results" / "old.md").write_text("# Older & slower\n\ntext\n")
    page = generated(tmp_path)
    assert "### 8 x 256, fp32, 2 processes, CPU\n" in page
    assert "| data 2 | 150.0 | 125.0 to 175.0 | 3413 | 2 | 50.0 | - | 3.00 | 8.0 | 0.00 |" in page
    assert "### 8 x 256, fp32, 1 process, CPU\n" in page and "| GELU, forward | 2.0 | 1.0 | 50 | - |" in page
    assert "product of 8 x 8 matrices in fp32: torch 2 TFLOP/s; copy: 3 GB/s" in " ".join(page.split())
    assert "- [Older & slower](results/old.md)" in page and "one.md" not in page
    for name in ("one", "two", "three"):
        assert f"[record](results/{name}.json)" in page and "\n\n    python benchmarks/compare.py\n" in page


def test_main_writes_what_is_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "benchmarks"
    fill(folder, one=record())
    monkeypatch.setattr(readme, "FOLDER", folder)
    assert readme.main() == 0
    assert (folder / "README.md").read_text() == generated(folder)
    shutil.rmtree(folder / "results")
    assert generated(folder).startswith("# Benchmarks\n") and "other engines" not in generated(folder)
