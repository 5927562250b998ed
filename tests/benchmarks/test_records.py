"""Tests of the records of benchmarks: their required fields, how they are written, and their description of a model."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import records

from megazero.config.model import ModelConfig
from megazero.config.presets import PRESETS
from megazero.errors import DataError


def timed(seconds: list[float], **others: Any) -> dict[str, Any]:
    return {
        "tokens_per_second": 100 / sorted(seconds)[len(seconds) // 2],
        "median_step_seconds": sorted(seconds)[len(seconds) // 2],
        "step_seconds": seconds,
        "losses": [2.0, 1.0],
        "peak_bytes": 3 << 20,
        "settings": "",
        **others,
    }


def example(**changes: Any) -> dict[str, Any]:
    record = {
        "program": "compare",
        "date": "2026-01-02",
        "device": "CPU",
        "torch": "2",
        "command": "python benchmarks/compare.py",
        "model": {"name": "tiny"},
        "precision": "fp32",
        "world_size": 2,
        "systems": {"ddp": timed([0.1, 0.2, 0.3])},
    }
    return {**record, **changes}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "results" / "a.json"
    records.write(example(), path)
    assert records.read(path) == example()
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]


@pytest.mark.parametrize("name", list(example()))
def test_nothing_may_be_missing(name: str, tmp_path: Path) -> None:
    record = example()
    del record[name]
    with pytest.raises(ValueError, match=f"{name} is missing"):
        records.write(record, tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    record = example(world_size="2", systems={"ddp": {"losses": []}, "floor": timed([1.0])})
    del record["torch"]
    with pytest.raises(ValueError) as caught:
        records.write(record, tmp_path / "a.json")
    text = str(caught.value)
    assert "torch is missing" in text and "world_size is '2', not of type int" in text
    assert "ddp lacks tokens_per_second, median_step_seconds, step_seconds, peak_bytes, settings" in text
    assert "floor" not in text


def test_kernels_and_systems_that_refused_have_less(tmp_path: Path) -> None:
    records.write(example(program="kernels", systems={"GELU": {"median_step_seconds": 1.0}}), tmp_path / "a.json")
    records.write(example(systems={"deepspeed-0": {"refused": "not installed"}}), tmp_path / "b.json")
    with pytest.raises(ValueError, match="GELU lacks median_step_seconds"):
        records.write(example(program="kernels", systems={"GELU": {}}), tmp_path / "c.json")


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    losses = [1.0, math.nan, math.inf]
    records.write(example(systems={"ddp": timed([0.1], losses=losses, settings=("a", {"b": -math.inf}))}), path)
    system = json.loads(path.read_text(), parse_constant=pytest.fail)["systems"]["ddp"]
    assert system["losses"] == [1.0, None, None] and system["settings"] == ["a", {"b": None}]


@pytest.mark.parametrize("text", ["[]", '{"program": "compare"}', "{"])
def test_other_files_are_no_records(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError):
        records.read(tmp_path / "a.json")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="writable"):
        records.write(example(), tmp_path / "file" / "a.json")


def test_models_have_names() -> None:
    small = ModelConfig(num_layers=3, hidden_size=8, num_attention_heads=2, seq_length=16, vocab_size=10)
    found = records.described(small)
    assert found["name"] == "3 x 8" and found["ffn_hidden_size"] == 32
    assert found["matmul_parameters"] == 3 * 12 * 8 * 8 + 10 * 8
    for name, row in PRESETS.items():
        assert records.described(ModelConfig(**row))["name"] == name
    shorter = ModelConfig(**{**PRESETS["gpt2-124m"], "seq_length": 128})
    assert records.described(shorter)["name"] == "12 x 768"


def test_quartiles() -> None:
    assert records.quartiles([4.0]) == (4.0, 4.0, 4.0)
    assert records.quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == (2.0, 3.0, 4.0)


def test_pages_and_records_lie_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for output in ("cpu-gpt2-1.5b", "cpu-gpt2-1.5b.md", "cpu-gpt2-1.5b.json"):
        assert records.place(tmp_path / output, ".json") == tmp_path / "cpu-gpt2-1.5b.json"
    records.publish(["# A", "b"], example(), tmp_path / "x-1.5b")
    assert capsys.readouterr().out == "# A\n\nb\n" == (tmp_path / "x-1.5b.md").read_text()
    assert records.read(tmp_path / "x-1.5b.json") == example()
    records.publish(["c"], example(), None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-1.5b.json", "x-1.5b.md"]


def test_where_and_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/x/y.py", "--output", "z", "--", "--bf16"])
    assert records.command() == "python benchmarks/y.py -- --bf16"
    assert records.device_name("cpu") == "CPU" and len(records.today()) == len("2026-01-02")
