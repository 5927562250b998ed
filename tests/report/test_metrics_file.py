"""Tests of the metrics file: the lines that another program reads, and what stays of them when a run resumes."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from support.step_metrics import make_step

from megazero.errors import ConfigError
from megazero.report.metrics import Evaluation, RankMetrics, StepMetrics
from megazero.report.metrics_file import MetricsFile, problem_of_run
from megazero.report.part_times import PartTimes

RANKS = [
    RankMetrics(
        1000, {"parameters": 4, "gradients": 4, "master": 8, "moments": 16}, {"tp": {"all_reduce": 12}}, {}, 0.125
    ),
    RankMetrics(2000, {"parameters": 4, "gradients": 4, "master": 8, "moments": 16}, {}),
]


def step(iteration: int, **changes: Any) -> StepMetrics:
    """Return the figures of a step, some of which take all digits of a float."""
    digits = {"loss": 1 / 3, "grad_norm": 0.1, "lr": 1e-3 / 7}
    seconds = {"step_seconds": 0.5, "tflops_per_device": 0.25, "data_wait_seconds": 0.125}
    return make_step(iteration, **{**digits, **seconds, **changes})


def write(path: Path, iterations: range, *, resumed: int = 0) -> None:
    file = MetricsFile(path, resumed_iteration=resumed)
    for iteration in iterations:
        file.step(step(iteration), RANKS)
        if iteration % 2 == 0:
            file.evaluation(Evaluation(iteration, 8 * iteration, "validation", loss=2.5, bytes_per_token=3.0))
    file.close()


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def places(path: Path) -> list[str]:
    """ "1 2 2e ...": steps and evaluations in the order of the file."""
    return [
        f"{line['evaluation']['iteration']}e" if "evaluation" in line else str(line["iteration"]) for line in read(path)
    ]


def test_times_of_parts_are_written_where_that_is_asked_for(tmp_path: Path) -> None:
    times = PartTimes("minmax", 4, {"optimizer": (0.5, 0.0, 0.25)})
    for has_timers in (True, False):
        file = MetricsFile(tmp_path / f"{has_timers}.jsonl", has_timers=has_timers)
        file.step(step(4, part_times=times), RANKS)
        file.close()
    assert read(tmp_path / "True.jsonl")[0]["timers"] == {"optimizer": {"min": 0.25, "max": 0.5}}
    assert "timers" not in read(tmp_path / "False.jsonl")[0]


def test_a_step_line_has_these_names_and_every_digit(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", range(1, 2))
    (line,) = read(tmp_path / "m.jsonl")
    assert line == {
        "iteration": 1,
        "consumed_samples": 8,
        "loss": 1 / 3,
        "grad_norm": 0.1,
        "lr": 1e-3 / 7,
        "loss_scale": 1.0,
        "skipped": False,
        "step_seconds": 0.5,
        "tokens_per_second": 100.0,
        "tflops_per_device": 0.25,
        "data_wait_seconds": 0.125,
        "ranks": [
            {
                "rank": 0,
                "peak_memory_bytes": 1000,
                "model_state_bytes": {"parameters": 4, "gradients": 4, "master": 8, "moments": 16},
                "comm_bytes": {"tp": {"all_reduce": 12}},
                "data_wait_seconds": 0.125,
            },
            {
                "rank": 1,
                "peak_memory_bytes": 2000,
                "model_state_bytes": {"parameters": 4, "gradients": 4, "master": 8, "moments": 16},
                "comm_bytes": {},
                "data_wait_seconds": 0.0,
            },
        ],
    }


def test_a_gpus_memory_stands_beside_the_ranks_peak(tmp_path: Path) -> None:
    figures = {"reserved_peak": 3000, "beyond_allocator": 500}
    file = MetricsFile(tmp_path / "m.jsonl")
    file.step(step(1), [RankMetrics(1000, {}, {}, device_memory_bytes=figures)])
    file.close()
    (rank,) = read(tmp_path / "m.jsonl")[0]["ranks"]
    assert (rank["peak_memory_bytes"], rank["device_memory_bytes"]) == (1000, figures)


def test_an_evaluation_line(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "new" / "m.jsonl")
    file.evaluation(Evaluation(0, 0, "validation", loss=3 * math.log(2), bytes_per_token=3.0))
    file.close()
    (line,) = read(tmp_path / "new" / "m.jsonl")
    assert line["evaluation"] == {
        "iteration": 0,
        "consumed_samples": 0,
        "split": "validation",
        "loss": 3 * math.log(2),
        "perplexity": pytest.approx(8.0),
        "bits_per_byte": 1.0,
    }


def test_infinities_are_null_and_the_parameter_is_named(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file.step(step(1, grad_norm=math.inf, loss=math.nan, skipped=True, overflow_parameter="final_norm.bias"), [])
    file.close()
    (line,) = read(tmp_path / "m.jsonl")
    assert (line["grad_norm"], line["loss"], line["skipped"]) == (None, None, True)
    assert line["overflow_parameter"] == "final_norm.bias"


def test_a_line_can_be_read_at_once(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file.step(step(1), [])
    assert places(tmp_path / "m.jsonl") == ["1"]
    file.close()
    file.close()


def test_resuming_repeats_no_line(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", range(1, 6))
    write(tmp_path / "m.jsonl", range(4, 7), resumed=3)
    assert places(tmp_path / "m.jsonl") == ["1", "2", "2e", "3", "4", "4e", "5", "6", "6e"]
    assert [path.name for path in tmp_path.iterdir()] == ["m.jsonl"]


def test_an_evaluation_at_the_resumed_step_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", range(1, 6))
    write(tmp_path / "m.jsonl", range(5, 6), resumed=4)
    assert places(tmp_path / "m.jsonl") == ["1", "2", "2e", "3", "4", "4e", "5"]


def test_a_run_from_the_beginning_starts_the_file_over(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", range(5))
    write(tmp_path / "m.jsonl", range(2))
    assert places(tmp_path / "m.jsonl") == ["0", "0e", "1"]


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, range(1, 4))
    path.write_bytes(path.read_bytes()[:-20])
    write(path, range(3, 4), resumed=3)
    assert places(path) == ["1", "2", "2e", "3"]


@pytest.mark.parametrize("foreign", [b"dear diary\n", b"[1, 2]\n", b'{"steps": 3}\n', b"\xff\xfe\x00\n"])
def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path, foreign: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(foreign)
    with pytest.raises(ConfigError, match="line 1"):
        MetricsFile(path)
    assert path.read_bytes() == foreign
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"]


def test_lines_carry_their_run_and_another_runs_file_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for resumed in (0, 1):
        file = MetricsFile(path, resumed_iteration=resumed, run="a1")
        file.step(step(resumed + 1), [])
        file.close()
    assert [line["run"] for line in read(path)] == ["a1", "a1"]
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"line 1: of run a1\n.* this is run b2"):
        MetricsFile(path, resumed_iteration=1, run="b2")
    assert path.read_bytes() == before
    MetricsFile(path, run="b2").close()
    assert path.read_bytes() == b""


def test_another_runs_file_is_known_by_its_first_line(tmp_path: Path) -> None:
    """Lines of an earlier version name no run; what is no metrics file, or none at all, is left to the writer."""
    path = tmp_path / "m.jsonl"
    assert problem_of_run(path, "a1") is None
    file = MetricsFile(path, run="a1")
    file.step(step(1), RANKS)
    file.step(step(2), [])
    file.close()
    own, unnamed = path.read_text(), '{"iteration": 0}\n'
    for earlier in (0, 1, 3):
        path.write_text(earlier * unnamed + own)
        assert problem_of_run(path, "a1") is None
        for run, words in (("b2", "run b2"), ("", "a run without an id")):
            problem = problem_of_run(path, run)
            assert problem is not None and problem.rule.endswith(f"and this is {words}")
            assert problem.given == f"--metrics-file {path}, line {earlier + 1}: of run a1"
            assert problem.legal == "a new file, or the file of this run"
    for content in (unnamed, "", "dear diary\n", "[1]\n", '{"iteration": 1, "run": "'):
        path.write_text(content)
        assert problem_of_run(path, "a1") is None
    path.unlink()
    os.mkfifo(path)
    assert problem_of_run(path, "a1") is None


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--metrics-file"):
        MetricsFile(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device without room is Linux's")
def test_a_full_disk_ends_no_run(tmp_path: Path) -> None:
    path, said = tmp_path / "m.jsonl", list[str]()
    file = MetricsFile(path, report=said.append)
    file.step(step(1), [])
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file._file.fileno())
    os.close(full)
    for iteration in (2, 3):
        file.step(step(iteration), [])
    file.close()
    assert said == [f"{path} cannot be written: No space left on device; training goes on without it"]
    assert places(path) == ["1"]


def test_a_fifo_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    """Opening a FIFO waits for a program at its other end."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="fifo: a FIFO is there"):
        MetricsFile(tmp_path / "fifo")
