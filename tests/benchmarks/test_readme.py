"""The page made of records: which records count, what the tables say, the chart, and that the page is not stale."""

import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import readme
import records
from ratio_chart import Bar, Panel, chart
from readme import CHART, FOLDER, Kept, compared, generated, newest, other_pages


def system(*seconds: float, **others: Any) -> dict[str, Any]:
    middle = records.quartiles(seconds)[1]
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
        records.write(content, folder / "results" / f"{name}.json")
    return folder


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]


def test_the_page_is_what_the_records_make() -> None:
    for path, text in generated(FOLDER).items():
        assert path.is_file() and path.read_text(encoding="utf-8") == text, "run python benchmarks/readme.py"


def test_the_chart_is_there_only_with_comparisons(tmp_path: Path) -> None:
    assert set(generated(fill(tmp_path, a=kernels()))) == {tmp_path / "README.md"}
    alone = {"base": None, "to_base": {}, "to_best_peer": {}}
    fill(tmp_path, b=record(world_size=1, ratios=alone))
    assert (
        set(generated(tmp_path)) == {tmp_path / "README.md"}
        and "svg" not in generated(tmp_path)[tmp_path / "README.md"]
    )
    assert set(generated(fill(tmp_path, b=record()))) == {tmp_path / "README.md", tmp_path / "results" / CHART}


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
    assert [kept.name for kept in newest(tmp_path / "results")] == ["d", "c", "a", "e", "f", "g"]


def test_a_broken_record_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"program": "compare"}')
    with pytest.raises(ValueError, match=r"a\.json is no record: date is missing"):
        newest(tmp_path)


def test_the_table_of_a_comparison() -> None:
    rows = {row[0]: row[1:] for row in cells(compared(record()))}
    assert rows["ddp"] == ["200.0", "150.0 to 250.0", "1.00", "-", "2560", "3.00", "16.0", "1.00"]
    assert rows["megazero-2"][2:4] == ["1.50", "3.00 floor"] and rows["floor"][2] == "0.50"
    assert rows["wrong"][2] == "differs" and rows["deepspeed-2"] == ["not installed", *["-"] * 7]


def test_the_page(tmp_path: Path) -> None:
    fill(tmp_path, one=record(), two=trained(), three=kernels())
    for name, text in (("one.md", "# a record's page\n"), ("old.md", "# Older & slower\n\ntext\n")):
        (tmp_path / "results" / name).write_text(text)
    assert other_pages(tmp_path / "results") == {"old.md": "Older & slower"}
    page = generated(tmp_path)[tmp_path / "README.md"]
    assert "### 8 x 256, fp32, 2 processes, CPU\n" in page and f"](results/{CHART})" in page
    assert "| 8 x 256, fp32, 2 processes, CPU | data 2 | 150.0 (125.0 to 175.0) | 3413 | 2 | 50.0 | - | 3.00 |" in page
    assert "### 8 x 256, fp32, 1 process, CPU\n" in page and "| GELU, forward | 2.0 | 1.0 | 50 |  |" in page
    assert "product of 8 x 8 matrices in fp32: torch 2 TFLOP/s; copy: 3 GB/s" in page
    assert "- [Older & slower](results/old.md)" in page and "one.md" not in page
    for name in ("one", "two", "three"):
        assert f"[record](results/{name}.json)" in page and "\n\n    python benchmarks/compare.py\n" in page


def test_main_writes_what_is_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "benchmarks"
    fill(folder, one=record())
    monkeypatch.setattr(readme, "FOLDER", folder)
    assert readme.main() == 0
    assert {path: path.read_text() for path in generated(folder)} == generated(folder)
    shutil.rmtree(folder / "results")
    assert "Benchmarks" in generated(folder)[folder / "README.md"]


def test_bars_are_to_scale() -> None:
    panel = readme.panel(Kept("x", record()))
    assert panel.title == "8 x 256, fp32, 2 processes, CPU: by ddp's step"
    assert [bar.name for bar in panel.bars] == ["floor", "ddp", "megazero-2"]
    drawing = ElementTree.fromstring(chart("A & B", [panel, Panel("other", [Bar("<x>", 0.9, 1.0, 1.1)])]))
    widths = [float(rect.get("width", "")) for rect in drawing.iter() if rect.get("class") == "bar"]
    assert widths == pytest.approx([widths[1] * ratio for ratio in (0.5, 1.0, 1.5, 1.0)], abs=0.1)
    ours = [rect for rect in drawing.iter() if rect.get("class") == "bar" and rect.get("fill") == "#1b998b"]
    assert len(ours) == 1
    words = [text.text for text in drawing.iter() if text.tag.endswith("}text")]
    assert {"A & B", "other", "<x>", "megazero-2", "1.50", "0.50"} <= set(words)


@pytest.mark.parametrize("largest", [1.0, 2.9, 4.0, 8.0, 75.0])
def test_an_axis_has_a_readable_number_of_lines(largest: float) -> None:
    drawing = ElementTree.fromstring(chart("x", [Panel("y", [Bar("z", 1.0, largest, largest)])]))
    ticks = [text.text for text in drawing.iter() if text.get("class") == "tick"]
    assert 4 <= len(ticks) <= 13 and "0" in ticks
    assert "1" in ticks or largest > 10
