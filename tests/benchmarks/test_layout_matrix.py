"""Tests of the program that trains a sample of layouts: it resumes where it was stopped and fails on a deviation."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from layout_matrix import main, parse_arguments, read_records, sample, worst
from support.layouts import is_legal

FAMILIES = ("gpt2", "llama3")


def words(folder: Path, *more: str) -> list[str]:
    """Return the options for three layouts on up to two processes, with two steps each."""
    records, output = str(folder / "r.jsonl"), str(folder / "page.md")
    least = ["--count", "3", "--seed", "4", "--most-processes", "2", "--steps", "2", "--families", *FAMILIES]
    return ["--records", records, "--output", output, *least, *more]


def rewrite(folder: Path, **changes: Any) -> str:
    """Change the first record and return its layout."""
    first, *rest = (folder / "r.jsonl").read_text().splitlines()
    record = {**json.loads(first), **changes}
    (folder / "r.jsonl").write_text("\n".join([json.dumps(record), *rest]) + "\n")
    return str(record["layout"])


def test_the_draw_follows_from_its_seed() -> None:
    drawn = sample(40, 1, 2)
    assert drawn == sample(40, 1, 2) != sample(40, 2, 2)
    assert len(set(drawn)) == 40 and all(is_legal(case.layout) for case in drawn)
    assert {case.layout.world_size for case in drawn} == {1, 2}


def test_families_take_turns_in_layouts_that_are_legal_for_them() -> None:
    drawn = sample(40, 1, 2, FAMILIES)
    assert [case.family for case in drawn] == [*FAMILIES] * 20
    assert all(is_legal(case.layout, case.family) for case in drawn)
    assert len({str(case) for case in drawn}) == 40 and str(drawn[1]) == f"llama3 {drawn[1].layout}"


def test_what_is_not_there_is_far_off() -> None:
    figures = {"losses": 1e-15, "grad_norms": 3e-15, "weights": 2e-12}
    assert worst(figures) == 2e-12
    assert worst({**figures, "losses": float("nan")}) == worst({"error": "rank 1 raised"}) == float("inf")


def test_help_says_how_to_run_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["--help"])
    assert ended.value.code == 0
    assert "--records" in capsys.readouterr().out


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished sample."""
    folder = tmp_path_factory.mktemp("sample")
    assert main([*words(folder), "--minutes", "0"]) == 2, "nothing is begun when there is no time"
    assert not (folder / "r.jsonl").exists()
    assert main(words(folder)) == 0
    return folder


@pytest.fixture
def folder(done: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "sample"))


@pytest.mark.gloo
def test_a_sample_is_run_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = read_records(folder / "r.jsonl", 2)
    assert set(records) == {str(case) for case in sample(3, 4, 2, FAMILIES)}
    assert all(0 < worst(record) < 1e-9 for record in records.values())
    written = (folder / "r.jsonl").read_text()
    assert main(words(folder)) == 0
    assert (folder / "r.jsonl").read_text() == written
    page = (folder / "page.md").read_text()
    assert capsys.readouterr().out == page
    assert page.startswith("# 3 of 3 drawn layouts") and "| llama3 | 1 |" in page and "Not below the bound" not in page


@pytest.mark.gloo
def test_what_deviates_is_the_programs_status(folder: Path) -> None:
    layout = rewrite(folder, weights=2e-9, weight="final_norm.bias")
    assert main(words(folder)) == 1
    assert f"| {layout} | 2.0e-09 | final_norm.bias |" in (folder / "page.md").read_text()


@pytest.mark.gloo
def test_what_failed_or_was_cut_off_is_run_again(folder: Path) -> None:
    rewrite(folder, error="rank 0 raised")
    text = (folder / "r.jsonl").read_text()
    (folder / "r.jsonl").write_text(text[:-20])  # as if the program had been killed while it wrote the last record
    assert main([*words(folder), "--minutes", "0"]) == 1
    assert "| failed |" in (folder / "page.md").read_text()
    assert main(words(folder)) == 0
    assert len((folder / "r.jsonl").read_text().splitlines()) == 5
