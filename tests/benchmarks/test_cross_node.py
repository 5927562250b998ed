"""Tests of the traffic between nodes, by formula, by meter and at an emulated link, and of the program, small."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from cross_node import Figures, Segment, flags, main, parse_arguments, schedule, work_of
from hypothesis import given
from hypothesis import strategies as st
from link_traffic import (
    ACROSS,
    INSIDE,
    LAYOUTS,
    WIRE,
    WORLD_SIZE,
    Prediction,
    Work,
    measured_rate,
    node_bytes,
    predicted_rate,
    process_numel,
)
from nodes import Cluster, ClusterError, Step, obstacle
from small_gpt import VOCABULARY, make_model
from support.source_tree import ROOT
from support.warm_python import warm_python
from torch import device

from megazero.config.model import ModelConfig

TINY = [
    *("--num-layers", "2", "--hidden-size", "64", "--seq-length", "128", "--global-batch-size", "4"),
    *("--steps", "2", "--rounds", "1"),
]
WORK = Work(num_layers=4, hidden_size=128, seq_length=256, vocab_size=512, global_batch_size=16)


def links() -> set[str]:
    """Return the network devices of the machine that an emulated cluster may have made."""
    return {path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith("mz")}


def namespaces() -> set[str]:
    return set(subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split())


@pytest.fixture
def left_as_it_was() -> Iterator[None]:
    reason = obstacle()
    if reason:
        pytest.skip(f"no emulated cluster: {reason}")
    before = links(), namespaces()
    yield
    assert (links(), namespaces()) == before


def test_parameters_are_the_models() -> None:
    config = ModelConfig(num_layers=3, hidden_size=48, num_attention_heads=4, seq_length=40)
    model = make_model(config, device("cpu"))
    work = Work(num_layers=3, hidden_size=48, seq_length=40, vocab_size=VOCABULARY, global_batch_size=2)
    assert process_numel(work, 1) == sum(parameter.numel() for parameter in model.parameters())


def test_activations_grow_with_the_batch_and_parameters_do_not() -> None:
    double = replace(WORK, global_batch_size=32)
    assert node_bytes(ACROSS, double) == 2 * node_bytes(ACROSS, WORK)
    assert node_bytes(INSIDE, double) == node_bytes(INSIDE, WORK)


def test_bytes_of_a_node_are_the_papers_volumes() -> None:
    """All-reduces send twice their message, ZeRO stage 2 sends two elements a parameter, both times (n - 1) / n."""
    message = 16 * 256 * 128 * 4
    assert node_bytes(ACROSS, WORK) == pytest.approx((5 * 4 + 2) * 2 * message * 3 / 4, rel=0.002)
    assert node_bytes(INSIDE, WORK) == pytest.approx(2 * 4 * process_numel(WORK, 1) / 2, rel=0.05)


rates = st.floats(1, 1e5)


@given(rates, st.floats(0.01, 10), st.floats(1.5, 30))
def test_the_predicted_rate_is_where_the_ratio_is(mbit: float, seconds: float, more: float) -> None:
    across, inside = Prediction(1.2 * seconds, int(more * 1e7)), Prediction(seconds, 10_000_000)
    ratio = across.seconds(mbit) / inside.seconds(mbit)
    if 1.21 < ratio < 0.999 * more:
        assert predicted_rate(across, inside, ratio) == pytest.approx(mbit, rel=1e-3)
    assert predicted_rate(across, inside, 1.01 * more) == (math.inf if 1.01 * more <= 1.2 else None)
    assert predicted_rate(across, inside, 1.1) == math.inf


def test_a_step_takes_as_long_as_its_bytes_on_the_link() -> None:
    """A slow link adds a step's bytes over its rate to the step's other seconds: 12.5 MB take 1 s at 100 Mbit/s."""
    assert Prediction(0.5, 12_500_000).seconds(100) == pytest.approx(0.5 + WIRE)
    assert Prediction(0.5, 12_500_000).seconds(None) == 0.5
    assert pytest.approx(1.07, abs=0.01) == WIRE


def test_a_rate_between_measured_points() -> None:
    points = [(400.0, 5.0), (100.0, 10.0), (50.0, 12.0)]
    assert measured_rate(points, 5.0) == pytest.approx(400)
    assert measured_rate(points, 7.5) == pytest.approx(200)  # half-way in logarithms
    assert measured_rate(points, 12.0) == pytest.approx(50)
    assert measured_rate(points, 4.9) is None and measured_rate(points, 12.1) is None
    assert measured_rate([(100.0, 3.0)], 3.0) is None


def test_a_turns_steps() -> None:
    """A turn gives the seconds of every step, the bytes of the node that sent more, and the meter's over all rings."""
    steps = [
        Step(
            {"step_seconds": 0.1 * number, "loss": 9.0 - number, "ranks": [{"comm_bytes": {"dp": {"x": 3, "y": 4}}}]},
            sent,
        )
        for number, sent in enumerate([[100, 10], [150, 70], [250, 90]])
    ]
    figures = Figures()
    for _ in range(2):
        figures.add(INSIDE, steps[0], steps[1:])
    assert figures == Figures([[0.1, 0.2], [0.1, 0.2]], [60, 100, 60, 100], 14, 8.0)
    assert figures.median == pytest.approx(0.15)
    assert schedule([200.0, 100.0], 2) == [Segment(None, 2, 2), Segment(200.0, 1, 2), Segment(100.0, 1, 2)]


def test_layouts_take_the_same_batch() -> None:
    options = parse_arguments([])
    for layout in LAYOUTS:
        words = flags(layout, options)
        told = {name: words[words.index(name) + 1] for name in ("--micro-batch-size", "--global-batch-size")}
        assert int(told["--micro-batch-size"]) * layout.data_parallel == int(told["--global-batch-size"]) == 16
        assert layout.data_parallel * layout.tensor_parallel == WORLD_SIZE
    assert work_of(options) == WORK


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--heads 6 --vocab-size 100", "--heads 6 is no multiple of 4; --vocab-size 100 is no multiple of 512"),
        ("--rates 0", "not between 0.1 and 100000"),
        ("--rounds 0", "0 is less than 1"),
    ],
)
def test_wrong_options(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(words.split())
    assert caught.value.code == 2 and told in capsys.readouterr().err


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main([]) == 2
    assert "need root" in capsys.readouterr().err


def test_the_script_is_sound() -> None:
    script = ROOT / "benchmarks" / "cluster.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    told = subprocess.run(["bash", str(script)], capture_output=True, text=True)
    assert told.returncode == 2 and all(f"cluster.sh {word}" in told.stdout for word in ("up", "rate", "down"))


def test_links_have_the_rate_they_are_told(left_as_it_was: None, tmp_path: Path) -> None:
    with Cluster(2) as cluster:
        cluster.set_rate(12.5)
        show = cluster.start(1, ["tc", "qdisc", "show", "dev", "eth0"], {}, tmp_path / "log")
        assert show.popen.wait() == 0 and "tbf" in show.log.read_text() and "rate 12500Kbit" in show.log.read_text()
        cluster.set_rate(None)
        show = cluster.start(1, ["tc", "qdisc", "show", "dev", "eth0"], {}, tmp_path / "log")
        assert show.popen.wait() == 0 and "tbf" not in show.log.read_text()
        with pytest.raises(ClusterError, match="is up already"), Cluster(2):
            pass


@pytest.mark.gloo
def test_the_program(
    left_as_it_was: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formula and meter are equal; the link counts as many bytes, and those of headers and small messages."""
    monkeypatch.setattr(sys, "executable", warm_python())
    assert main([*TINY, "--rates", "20", "--output", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert capsys.readouterr().out == page
    record = json.loads((tmp_path / "page.json").read_text())
    assert record["prediction"]["stated"] in page.replace("\n", " ")
    found = {(entry["layout"], entry["mbit"]): entry for entry in record["measured"]}
    assert list(found) == [(layout.name, rate) for layout in LAYOUTS for rate in (None, 20.0)]
    for (name, rate), entry in found.items():
        stated = record["prediction"]["layouts"][name]["node_bytes"]
        assert entry["metered"] == stated
        assert [len(turn) for turn in entry["seconds"]] == [2]
        if rate:  # only on a slow link do steps take long enough for their bytes to be told apart
            assert 0.8 < sum(entry["wire"]) / 2 / stated < 1.4, (name, entry["wire"])
    # A link is not faster than its rate, apart from the burst of an idle one.
    slow = found["across", 20.0]
    assert sum(slow["seconds"][0]) > 0.9 * 8e-6 * sum(slow["wire"]) / 20
    assert found["across", None]["loss"] == pytest.approx(found["inside", None]["loss"], rel=1e-5)


@pytest.mark.gloo
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_takes_everything_down(left_as_it_was: None, number: signal.Signals) -> None:
    """A signal in the middle of a run ends its processes and removes the emulated cluster."""
    command = [sys.executable, str(ROOT / "benchmarks" / "cross_node.py"), *TINY, "--rates", "20"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program:
        try:
            ranks = running_ranks(program.pid)
            program.send_signal(number)
            program.wait(timeout=120)
        finally:
            program.kill()
    assert program.returncode == 128 + number and len(ranks) == WORLD_SIZE
    deadline = time.monotonic() + 30  # what has been killed is there until its parent, or the system, has collected it
    while left := [rank for rank in ranks if Path(f"/proc/{rank}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def running_ranks(parent: int) -> list[str]:
    """Return the process ids of the first run's ranks, once all have started."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError, ProcessLookupError):  # a child has ended meanwhile
            found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
            commands = [Path(f"/proc/{child}/cmdline").read_bytes() for child in found]
            if len(found) == WORLD_SIZE and all(b"pretrain_gpt.py" in words for words in commands):
                return found
        time.sleep(0.05)
    raise AssertionError("no run in three minutes")
