"""Tests of console lines, field by field, and of TensorBoard's event files, read back by TensorBoard."""

import math
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.step_metrics import make_step
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megazero.config.run import LoggingConfig
from megazero.console import Console
from megazero.memory.ledger_figures import CATEGORIES
from megazero.report.curves_file import CurvesFile
from megazero.report.metrics import Evaluation, RankMetrics, StepMetrics
from megazero.report.metrics_file import MetricsFile
from megazero.report.part_times import PartTimes
from megazero.report.trackers import TensorBoard
from megazero.report.writers import ConsoleWriter, TrackerWriter, as_markdown, open_writers

RANKS = [
    RankMetrics(1000, {"parameters": 4, "moments": 16}, {}),
    RankMetrics(900, {"parameters": 5, "moments": 15}, {}),
]

TIMES = PartTimes("minmax", 2, {"forward-backward": (0.25, 0.5)})


def step(iteration: int, **changes: Any) -> StepMetrics:
    return make_step(iteration, **{"grad_norm": 1.25, "step_seconds": 0.5, "tflops_per_device": 12.5, **changes})


def tensorboard_writer(folder: Path, *, world_size: int = 1, texts: Any = None, **settings: Any) -> TrackerWriter:
    resumed = settings.pop("resumed_iteration", 0)
    config = LoggingConfig(tensorboard_dir=folder, **settings)
    tracker = TensorBoard(folder, queue_size=10)
    return TrackerWriter(config, tracker, world_size=world_size, texts=texts or {}, resumed_iteration=resumed)


def console_writer(**changes: int) -> ConsoleWriter:
    settings = {"log_interval": 10, "train_iters": 100, **changes}
    return ConsoleWriter(Console(0), **settings, now=lambda: datetime(2026, 3, 4, 5, 6, 7))


def test_console_line(capsys: pytest.CaptureFixture[str]) -> None:
    console_writer().step(step(1, mfu=0.415), RANKS)
    assert capsys.readouterr().out.rstrip("\n").split(" | ") == [
        "[2026-03-04 05:06:07] iteration   1/100",
        "consumed samples: 8",
        "elapsed time per iteration (ms): 500.0",
        "throughput per device (TFLOP/s): 12.5",
        "MFU: 41.5%",
        "tokens/s: 100",
        "learning rate: 1.000000E-03",
        "global batch size: 8",
        "lm loss: 2.000000E+00",
        "loss scale: 1.0",
        "grad norm: 1.250",
        "number of skipped iterations: 0",
        "number of nan iterations: 0",
        "data wait (ms): 0.0",
        "ETA: 49.5s",
    ]


def test_console_has_the_times_of_parts_behind_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    console_writer(times_parts=True).step(step(10, part_times=TIMES), RANKS)
    console_writer().step(step(10, part_times=TIMES), RANKS)
    line, heading, part, again = capsys.readouterr().out.splitlines()
    assert "iteration  10/100" in line and "iteration  10/100" in again
    assert heading == "milliseconds a step, over 2 steps, minimum and maximum of all ranks:"
    assert part.split() == ["forward-backward", "250.00", "500.00"]


def test_console_prints_the_first_step_every_interval_and_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    writer = console_writer(train_iters=25)
    for iteration in range(1, 26):
        writer.step(step(iteration, loss=float(iteration)), RANKS)
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    writer.close()
    assert capsys.readouterr().out == ""
    assert [fields[0].split("iteration ")[1] for fields in lines] == [" 1/25", "10/25", "20/25", "25/25"]
    # Means over steps 1, 2-10, 11-20 and 21-25.
    assert [float(fields[8].split(": ")[1]) for fields in lines] == [1.0, 6.0, 15.5, 23.0]


def test_console_adds_up_what_an_interval_has_waited(capsys: pytest.CaptureFixture[str]) -> None:
    writer = console_writer(log_interval=3)
    for iteration in range(1, 5):
        writer.step(step(iteration, data_wait_seconds=iteration / 1000), RANKS)
    writer.close()
    waits = [line.split("data wait (ms): ")[1].split(" |")[0] for line in capsys.readouterr().out.splitlines()]
    assert waits == ["1.0", "5.0", "4.0"]


def test_console_close_shows_what_was_held_back(capsys: pytest.CaptureFixture[str]) -> None:
    writer = console_writer()
    for iteration in (41, 42, 43):
        writer.step(step(iteration), RANKS)
    writer.close()
    writer.close()
    iterations = [line.split("iteration ")[1].split("/")[0].strip() for line in capsys.readouterr().out.splitlines()]
    assert iterations == ["41", "43"]


def test_console_names_what_overflowed(capsys: pytest.CaptureFixture[str]) -> None:
    console_writer().step(step(1, skipped=True, grad_norm=math.inf, overflow_parameter="final_norm.bias"), RANKS)
    first, line = capsys.readouterr().out.splitlines()
    assert first == "iteration 1 skipped: final_norm.bias overflowed first"
    assert "lm loss: - | " in line and "number of skipped iterations: 1" in line and "MFU: - | " in line


def test_console_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    console_writer().evaluation(Evaluation(20, 160, "validation", loss=math.log(8), bytes_per_token=3.0))
    console_writer().evaluation(Evaluation(20, 160, "test", loss=50.0))
    validation, test = (line.split(" | ") for line in capsys.readouterr().out.splitlines())
    assert validation == [
        "validation loss at iteration 20",
        "lm loss value: 2.079442E+00",
        "lm loss PPL: 8.000000E+00",
        "bits per byte: 1.0000",
    ]
    assert test == ["test loss at iteration 20", "lm loss value: 5.000000E+01", "lm loss PPL: 4.851652E+08"]


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def write_tensorboard(folder: Path, **settings: Any) -> dict[str, list[tuple[int, float]]]:
    writer = tensorboard_writer(folder, world_size=2, **settings)
    for iteration in (1, 2):
        writer.step(step(iteration, part_times=TIMES if iteration == 2 else None), RANKS)
    writer.evaluation(Evaluation(2, 16, "validation", loss=math.log(8), bytes_per_token=3.0))
    writer.close()
    return events(folder)


def test_tensorboard_has_groups_the_first_of_which_is_the_loss(tmp_path: Path) -> None:
    scalars = write_tensorboard(tmp_path)
    both = ["learning-rate", "batch-size", "loss-scale", "grad-norm"]
    for tag in (*(f"optimizer/{name}" for name in both), "loss/train", "speed/world-size"):
        assert [at for at, _ in scalars[tag]] == [1, 2]
        assert [at for at, _ in scalars[f"vs-samples/{tag}"]] == [8, 16]
    assert scalars["speed/seconds-per-step"] == [(1, 0.5), (2, 0.5)]
    assert scalars["speed/tflops-per-device"] == [(1, 12.5), (2, 12.5)]
    assert scalars["loss/validation"] == [(2, pytest.approx(math.log(8)))]
    assert scalars["vs-samples/loss/validation"] == [(16, pytest.approx(math.log(8)))]
    assert scalars["loss/validation-bits-per-byte"] == [(2, pytest.approx(1.0))]
    assert sorted({tag.split("/")[0] for tag in scalars}) == ["loss", "optimizer", "speed", "vs-samples"]
    assert "loss/validation-perplexity" not in scalars


def names_in_the_docs() -> Iterator[str]:
    """Yield the names in the first column of the table of TensorBoard's tags; flags are no names."""
    page = (Path(__file__).parents[2] / "docs" / "watching.md").read_text(encoding="utf-8")
    table = page.partition("| TensorBoard |")[2].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        yield from (name for name in re.findall(r"`([^`]+)`", row.split("|")[1]) if not name.startswith("--"))


def test_the_docs_name_every_tag(tmp_path: Path) -> None:
    """Every tag that is written is one of the table, and every row of the table is written."""
    flags = ("log_memory_to_tensorboard", "log_timers_to_tensorboard", "log_validation_ppl_to_tensorboard")
    at_peak = {**dict.fromkeys(CATEGORIES, 1), "temporary": 2}
    traffic = {"dp": {"all_gather": {"messages": 1, "bytes": 2}}}
    elsewhere = {"pinned_host": 1, "host": 2, "file": 3}
    ledger = {"peak_bytes": 10, "at_peak": at_peak, "traffic": traffic, "elsewhere": elsewhere}
    device = {"reserved_peak": 3000, "beyond_allocator": 500}
    sent, across = {"dp": {"send": 7}, "host": {"store": 9}}, {"dp": {"send": 3}}
    rank = RankMetrics(
        1000, {"parameters": 4}, sent, ledger=ledger, device_memory_bytes=device, bytes_across_nodes=across
    )
    writer = tensorboard_writer(tmp_path, world_size=2, **dict.fromkeys(flags, True))
    statistics = {"params_norm": 1.0, "num_zeros": 2.0, "variance_l1": 3.0, "grad_norm.layers.0": 4.0}
    first = step(1, part_times=TIMES, mfu=0.4, pipeline_idle_share=0.1, statistics=statistics, seq_length=16)
    writer.step(first, [rank])
    for split in ("validation", "test"):
        writer.evaluation(Evaluation(1, 8, split, loss=2.0, bytes_per_token=3.0))
    writer.close()
    patterns = [re.escape(name) for name in names_in_the_docs()]
    patterns = [
        re.sub(r"[A-Z]+", "[a-z_-]+", pattern.replace("vs\\-samples/NAME", "vs-samples/.+")) for pattern in patterns
    ]
    written = events(tmp_path)
    assert (written["traffic/inside-nodes"], written["traffic/across-nodes"]) == ([(1, 4)], [(1, 3)])
    assert [tag for tag in written if not any(re.fullmatch(pattern, tag) for pattern in patterns)] == []
    assert [each for each in patterns if not any(re.fullmatch(each, tag) for tag in written)] == []


def test_tensorboard_has_texts(tmp_path: Path) -> None:
    texts = {"configuration": as_markdown(["lr: 0.1", "# *", ""]), "layout": as_markdown(["rank 0"])}
    tensorboard_writer(tmp_path, texts=texts, resumed_iteration=7).close()
    accumulator = EventAccumulator(str(tmp_path)).Reload()
    shown = {tag: accumulator.Tensors(tag)[0] for tag in accumulator.Tags()["tensors"]}
    assert {tag: event.step for tag, event in shown.items()} == {
        "run/configuration/text_summary": 7,
        "run/layout/text_summary": 7,
    }
    content = shown["run/configuration/text_summary"].tensor_proto.string_val
    assert content == [b"    lr: 0.1\n    # *\n    "]


def test_tensorboard_options(tmp_path: Path) -> None:
    scalars = write_tensorboard(
        tmp_path,
        log_memory_to_tensorboard=True,
        log_timers_to_tensorboard=True,
        log_validation_ppl_to_tensorboard=True,
        tensorboard_log_interval=2,
    )
    assert scalars["loss/train"] == [(2, 2.0)]
    assert scalars["time/forward-backward"] == [(2, 0.5)]
    assert scalars["time/forward-backward-min"] == [(2, 0.25)]
    # Each kind of memory is that of the rank with the most of it.
    assert scalars["memory/states-parameters"] == [(2, 5.0)]
    assert scalars["memory/states-moments"] == [(2, 16.0)]
    assert scalars["memory/process-peak"] == [(2, 1000.0)]
    assert scalars["loss/validation-perplexity"] == [(2, pytest.approx(8.0))]


def test_tensorboard_has_a_gpus_memory(tmp_path: Path) -> None:
    ranks = [RankMetrics(1000, {}, {}, device_memory_bytes={"reserved_peak": 3000, "beyond_allocator": 500})]
    writer = tensorboard_writer(tmp_path)
    writer.step(step(1), ranks)
    writer.close()
    memory = {tag: points for tag, points in events(tmp_path).items() if tag.startswith("memory/")}
    assert memory == {
        "memory/allocator-peak": [(1, 1000.0)],
        "memory/reserved-peak": [(1, 3000.0)],
        "memory/beyond-allocator": [(1, 500.0)],
    }


def test_tensorboard_adds_up_what_was_waited_between_points(tmp_path: Path) -> None:
    writer = tensorboard_writer(tmp_path, tensorboard_log_interval=2)
    for iteration in range(1, 5):
        writer.step(step(iteration, data_wait_seconds=float(iteration)), RANKS)
    writer.close()
    assert events(tmp_path)["speed/data-wait-seconds"] == [(2, 3.0), (4, 7.0)]


def test_a_skipped_step_draws_no_loss(tmp_path: Path) -> None:
    writer = tensorboard_writer(tmp_path)
    writer.step(step(1, skipped=True), RANKS)
    writer.close()
    assert "loss/train" not in events(tmp_path) and "optimizer/loss-scale" in events(tmp_path)


def test_only_the_speaking_rank_writes(tmp_path: Path) -> None:
    config = LoggingConfig(metrics_file=tmp_path / "m.jsonl", tensorboard_dir=tmp_path / "tb")
    assert open_writers(config, console=Console(1), train_iters=10, world_size=2) == ()
    assert list(tmp_path.iterdir()) == []
    writers = open_writers(config, console=Console(0), train_iters=10, world_size=2, curves=tmp_path / "c.jsonl")
    assert [type(writer) for writer in writers] == [ConsoleWriter, MetricsFile, CurvesFile, TrackerWriter]
    for writer in writers:
        writer.close()


def test_the_console_alone_by_default() -> None:
    (writer,) = open_writers(LoggingConfig(), console=Console(0), train_iters=10, world_size=1)
    assert isinstance(writer, ConsoleWriter)
