"""Tests of the program that judges predicted times: its draw, its records and its figures."""

import itertools
import json
from pathlib import Path

import pytest
from plan_time import Records, draws, least_disturbed, parse_arguments, rank_correlation, read_records, summary
from steps import configuration_of


def test_the_draw_follows_from_its_seed() -> None:
    first, again, other = (list(itertools.islice(draws(seed, 4), 12)) for seed in (1, 1, 2))
    assert first == again != other
    assert len({str(layout) for layout in first}) == 12
    for world, words in first:
        configuration_of(words, world)  # raises what is not legal
    assert {world for world, _ in itertools.islice(draws(1, 1), 6)} == {1}


def test_the_figures_by_hand() -> None:
    rows = [(1.0, 1.0), (2.2, 2.0), (3.0, 4.0), (8.0, 8.0)]
    found = summary(rows)
    assert found["median error"] == pytest.approx((0.0 + 0.1) / 2)
    assert (found["within 15 %"], found["rank correlation"]) == (0.75, 1.0)
    assert rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == -1


def test_a_record_is_found_once(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"key": "a", "seconds": 1.0}) + '\n{"key": "b", "seco')
    records = Records(path, minutes=1)
    assert records.get("a", lambda: pytest.fail("it is known")) == {"key": "a", "seconds": 1.0}
    found = records.get("b", lambda: {"seconds": 2.0})
    assert found == {"key": "b", "seconds": 2.0}
    assert read_records(path)["b"]["seconds"] == 2.0
    assert Records(path, minutes=0).get("c", dict) is None
    assert Records(path, minutes=0).get("b", dict) == found


def test_a_measurement_is_repeated_for_what_others_take_alone() -> None:
    quiet, noisy = {"seconds": 9.0, "others": 0.04}, {"seconds": 1.0, "others": 0.3}
    assert least_disturbed(lambda: quiet) == {**quiet, "tries": 1}
    source = iter([noisy, quiet])
    assert least_disturbed(lambda: next(source)) == {**quiet, "tries": 2}
    source = iter([noisy, {"seconds": 2.0, "others": 0.2}, noisy])
    assert least_disturbed(lambda: next(source)) == {"seconds": 2.0, "others": 0.2, "tries": 3}


def test_a_seed_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--records", "r.jsonl"])
    assert "--seed" in capsys.readouterr().err
