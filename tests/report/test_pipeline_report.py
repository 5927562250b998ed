"""Tests of traces of real runs: which steps are traced, what their files hold, and how clocks are aligned."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.processes import run_ranks
from support.schedule_drawings import computations
from support.small_runs import train_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megazero.pipeline.schedule import Kind, Shape
from megazero.pipeline.stage_plan import StagePlan
from megazero.pipeline.timeline import predicted_idle_share, simulate
from megazero.pipeline.trace import rows, timeline
from megazero.report.pipeline_report import on_one_clock, summary

VIRTUAL = "num_layers_per_virtual_pipeline_stage"
SPLIT = {Kind.FORWARD: 2.0, Kind.INPUT_GRADIENT: 3.0, Kind.WEIGHT_GRADIENT: 1.0}


def traced(rank: int, size: int, settings: dict[str, Any]) -> str:
    """Run a training of two pipeline stages unless `settings` override it; return what it prints."""
    given = {"mock_data": True, "num_layers": 4, "pipeline_model_parallel_size": 2, **settings}
    return train_run(rank, size, given).text


def in_folder(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    return {"pipeline_trace_dir": str(folder / "traces"), "metrics_file": str(folder / "m.jsonl"), **settings}


def traces(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the trace of each step by its number, after checking that its drawing has a box for each computation."""
    read = [json.loads(path.read_text()) for path in (folder / "traces").glob("*.json")]
    for record in read:
        drawing = (folder / "traces" / f"step_{record['iteration']}.svg").read_text()
        boxes = sum(rect.get("class") == "box" for rect in ElementTree.fromstring(drawing).iter())
        assert boxes == 2 * sum(map(len, record["stages"]))  # measured, and ideal
    assert len(list((folder / "traces").iterdir())) == 2 * len(read)
    return {record["iteration"]: record for record in sorted(read, key=lambda record: int(record["iteration"]))}


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "settings"),
    [("gpipe", {}), ("1f1b", {}), ("zero-bubble", {}), ("interleaved", {VIRTUAL: 1})],
)
def test_a_trace_has_the_schedule_of_the_step(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    given = in_folder(tmp_path, {"pipeline_schedule": name, "global_batch_size": 8, "train_iters": 3, **settings})
    texts = run_ranks(2, traced, 2, given)
    found = traces(tmp_path)
    assert list(found) == [2, 3]  # the second and the last
    shape = Shape(2, 4, 2 if settings else 1)
    for step, record in found.items():
        assert [[row[:3] for row in stage] for stage in record["stages"]] == [
            [[action.kind.value, action.micro_batch, action.chunk] for action in stage]
            for stage in computations(name, shape)
        ]
        measured = timeline(record["stages"])
        assert measured.stages[0][0].start == 0 < record["idle_share"] < 1
        assert record["seconds"] == pytest.approx(measured.makespan)
        means = {Kind(kind): seconds for kind, seconds in record["mean_seconds"].items()}
        assert record["predicted_idle_share"] == pytest.approx(predicted_idle_share(name, shape, means))
        starts_of_last = {row[1]: row[3] for row in record["stages"][1] if row[0] == "F" and row[2] == 0}
        ends_of_first = {row[1]: row[4] for row in record["stages"][0] if row[0] == "F" and row[2] == 0}
        assert all(starts_of_last[m] > ends_of_first[m] for m in range(4)), f"step {step}: one clock, causes first"
    (closing,) = [line for line in texts[0].splitlines() if line.startswith("pipeline, step")]
    share, predicted = 100 * found[3]["idle_share"], 100 * found[3]["predicted_idle_share"]
    assert closing.startswith("pipeline, step 3: 2 pipeline stages x ")
    assert f"idle {share:.1f} % ({predicted:.1f} % by the formula); " in closing
    assert closing.endswith("step_3.svg")
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line.get("pipeline_idle_share") for line in lines] == [
        None,
        *(record["idle_share"] for record in found.values()),
    ]


@pytest.mark.gloo
def test_with_data_and_tensor_parallelism_one_pipeline_is_traced(tmp_path: Path) -> None:
    given = in_folder(tmp_path, {"tensor_model_parallel_size": 2, "global_batch_size": 4, "train_iters": 2})
    run_ranks(4, traced, 4, given)
    (record,) = traces(tmp_path).values()
    assert len(record["stages"]) == 2 and record["num_micro_batches"] == 2


def test_one_stage_is_traced_too_and_the_board_gets_the_share(tmp_path: Path) -> None:
    """Traced are the second step, every log_interval-th and the last; evaluations between them leave no spans."""
    settings = {
        "pipeline_model_parallel_size": 1,
        "log_interval": 3,
        "train_iters": 7,
        "eval_iters": 1,
        "eval_interval": 1,
        "tensorboard_dir": str(tmp_path / "board"),
    }
    traced(0, 1, in_folder(tmp_path, settings))
    found = traces(tmp_path)
    assert list(found) == [2, 3, 6, 7]
    assert all([row[0] for row in record["stages"][0]] == ["F", "B"] for record in found.values())
    assert all(record["predicted_idle_share"] == 0 <= record["idle_share"] < 1 for record in found.values())
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    images = board.Images("pictures/pipeline")
    assert [image.step for image in images] == list(found) and images[0].width > images[0].height > 100
    shares = board.Scalars("speed/pipeline-idle-share")
    assert [event.step for event in shares] == [2, 3, 6, 7]
    assert [event.value for event in shares] == pytest.approx([record["idle_share"] for record in found.values()])


def test_without_a_folder_nothing_is_traced(tmp_path: Path) -> None:
    given = in_folder(tmp_path, {"pipeline_model_parallel_size": 1}) | {"pipeline_trace_dir": None}
    text = traced(0, 1, given)
    assert "pipeline, step" not in text and not (tmp_path / "traces").exists()
    assert "idle" not in (tmp_path / "m.jsonl").read_text()


@pytest.mark.parametrize("same_machine", [True, False])
def test_clocks_of_machines_are_set_by_the_barrier(same_machine: bool) -> None:
    """Ranks on machines whose clocks differ, or on one machine, give the timeline of the simulated step."""
    shape = Shape(3, 4)
    simulated = simulate(computations("zero-bubble", shape), shape, SPLIT)
    begins = [50.0, 50.0, 50.0] if same_machine else [1000.0, 50.0, 7.0]
    ranks = [
        {
            # Ranks of one machine leave a barrier a little after another, which must not shift their spans.
            "machine": "a" if same_machine else f"node{rank}",
            "together": begin + 0.25 * rank * same_machine,
            "spans": [[*row[:3], row[3] + begin, row[4] + begin] for row in rows(spans)],
        }
        for rank, (begin, spans) in enumerate(zip(begins, simulated.stages, strict=True))
    ]
    assert timeline(on_one_clock(json.loads(json.dumps(ranks)))) == simulated


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
def test_a_step_without_delays_is_as_the_formula_says(name: str) -> None:
    shape = Shape(3, 5)
    durations = {**SPLIT, Kind.BACKWARD: 4.0}
    record = summary(simulate(computations(name, shape), shape, durations), StagePlan(name, 3))
    assert (record["num_stages"], record["num_micro_batches"], record["num_chunks"]) == (3, 5, 1)
    assert record["idle_share"] == pytest.approx(predicted_idle_share(name, shape, durations))
    assert record["idle_share"] == pytest.approx(record["predicted_idle_share"])
