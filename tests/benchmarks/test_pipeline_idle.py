"""Tests of the benchmark of pipeline stages' idle time: figures of simulated steps, and the program, small."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pipeline_idle import (
    CHUNKS,
    STAGES,
    Balance,
    Case,
    Times,
    configure,
    formula,
    held_table,
    in_order,
    main,
    measured_table,
    parse_arguments,
    simulated,
    simulated_table,
)
from support.each import each

from megazero.pipeline.schedule import Kind
from megazero.pipeline.timeline import Span, Timeline

TINY = (
    "--num-layers 4 --hidden-size 32 --seq-length 8 --micro-batches 2 4 --balance-layers 4 --balance-vocab-size 512"
    " --rounds 1 --steps 1 --device cpu"
)
WHOLE = {Kind.FORWARD: 0.010, Kind.BACKWARD: 0.020}
HALVES = {kind: seconds / 2 for kind, seconds in WHOLE.items()}
SPLIT = {Kind.FORWARD: 0.010, Kind.INPUT_GRADIENT: 0.011, Kind.WEIGHT_GRADIENT: 0.009}
DURATIONS = {"gpipe": WHOLE, "1f1b": WHOLE, "interleaved": HALVES, "zero-bubble": SPLIT}


def ideal(case: Case) -> Times:
    """Return the times of three simulated steps without delays."""
    return Times([simulated(case, DURATIONS[case.name], STAGES)] * 3, [1.0, 2.0, 3.0])


FOUND = {case: ideal(case) for case in (Case(name, number) for number in (2, 4) for name in CHUNKS)}


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]


def slower(measured: Timeline, seconds: float) -> Timeline:
    """Return the same timeline with the last computation of the last stage `seconds` later."""
    *others, last = measured.stages
    action, start, end = last[-1]
    return Timeline((*others, (*last[:-1], Span(action, start + seconds, end + seconds))))


@each("case", FOUND)
def test_steps_without_delays_are_as_the_formulas_say(case: Case) -> None:
    times = FOUND[case]
    assert times.idle == pytest.approx([formula(case, DURATIONS[case.name])] * 3)
    assert times.durations == pytest.approx(DURATIONS[case.name])
    assert times.step == 2.0


def test_medians_and_the_step_in_the_middle() -> None:
    step = ideal(Case("1f1b", 4)).timelines[0]
    steps = [slower(step, seconds) for seconds in (0.9, 0.1, 0.4)]
    times = Times(steps, [0.0] * 3)
    assert times.typical is steps[2]
    assert times.idle[0] < times.idle[1] == steps[2].idle_share < times.idle[2]
    assert times.makespan == pytest.approx(max(step.makespan, step.stages[-1][-1].end + 0.4))
    assert Times(steps[:1], [1.0]).idle == [steps[0].idle_share] * 3


def test_the_table_of_what_was_measured() -> None:
    rows = {(row[1], int(row[0])): row for row in cells(measured_table(FOUND))}
    assert rows["1f1b", 4][2:5] == ["20.0", "20.0", "20.0 (20.0 to 20.0)"]
    assert rows["interleaved", 4][2:4] == ["11.1", "11.1"]
    assert rows["zero-bubble", 2][5] == "F 10.0, I 11.0, W 9.0"
    assert rows["gpipe", 2][6:] == ["90.0", "1.00"]
    assert rows["interleaved", 2][6:] == ["75.0", "0.83"]


def test_the_table_of_more_stages() -> None:
    rows = {(row[1], int(row[0])): row[2:] for row in cells(simulated_table(FOUND))}
    assert {number for _, number in rows} == {4, 8}
    for (name, number), (predicted, found, ratio) in rows.items():
        assert predicted == found == f"{100 * formula(Case(name, number), DURATIONS[name], 4):.1f}"
        assert (float(ratio) < 1) == (name in ("interleaved", "zero-bubble"))
    assert rows["1f1b", 8][0] == "27.3"


def test_the_order_of_schedules() -> None:
    assert in_order(FOUND, [2, 4])
    late = Times([slower(FOUND[Case("interleaved", 4)].timelines[0], 9.0)], [1.0])
    assert not in_order({**FOUND, Case("interleaved", 4): late}, [2, 4])
    assert in_order({**FOUND, Case("interleaved", 4): late}, [2])


def test_what_is_said_of_splits() -> None:
    case = Case("1f1b", 4)
    short = {kind: seconds / 2 for kind, seconds in WHOLE.items()}
    times = {"equal": ideal(case), "balanced": Times([simulated(case, short, STAGES)], [1.0])}
    balance = Balance({"equal": (4, 4), "balanced": (7, 1)}, {"equal": 10.0, "balanced": 7.0, "head": 6.0}, times)
    text = balance.describe()
    assert "as 6.0 layers" in text and "7+1 layers where an equal one is 4+4" in text and "a ratio of 0.70" in text
    assert "take 75 ms beside 150: 0.50; whole steps" in text and "1000 beside 2000: 0.50" in text
    assert balance.case == case and text.endswith("it is 20.0 %.")


def test_the_table_of_activations() -> None:
    (first, second) = cells(held_table([{"gpipe": 8 << 20, "1f1b": 2 << 20}, {"gpipe": 8 << 20, "1f1b": 1 << 20}], 8))
    assert first == ["0", "8", "8.00", "2", "2.00", "0.250", "0.250"]
    assert second == ["1", "8", "8.00", "1", "1.00", "0.125", "0.125"]


def test_settings_are_legal_and_alike() -> None:
    options = parse_arguments([])
    configs = [configure(name, options) for name in CHUNKS]
    assert [config.parallel.pipeline_split for config in configs] == ["4,4", "4,4", "2,2,2,2", "4,4"]
    assert {config.model for config in configs} == {configs[0].model}


@pytest.mark.parametrize("words", ["--num-layers 6", "--micro-batches 2 3", "--micro-batches 0"])
def test_stages_that_would_not_be_alike_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(words.split())
    assert "layers in fours, micro-batches in twos" in capsys.readouterr().err


@pytest.mark.gloo
def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([*TINY.split(), "--output", str(tmp_path / "page.md")])
    page = (tmp_path / "page.md").read_text()
    assert capsys.readouterr().out == page and code in (0, 1)  # at this size exchanges take longer than computations
    measured, simulated_rows, held = (cells(part) for part in page.split("\n\n") if part.startswith("|"))
    assert [(row[1], int(row[0])) for row in measured] == [(case.name, case.micro_batches) for case in FOUND]
    assert len(simulated_rows) == len(FOUND)
    for row in held:
        assert float(row[5]) == pytest.approx(float(row[6]), abs=0.1)
    figures = json.loads((tmp_path / "page.json").read_text())
    assert len(figures["measured"]) == len(FOUND) and set(figures["balance"]) == {"equal", "balanced"}
    for name in CHUNKS:
        drawing = ElementTree.parse(tmp_path / f"page-{name}.svg")
        boxes = [rect for rect in drawing.iter() if rect.get("class") == "box"]
        assert len(boxes) == 2 * STAGES * CHUNKS[name] * 4 * (3 if name == "zero-bubble" else 2)
    assert sum(figures["balance"]["balanced"]["split"]) == 4
