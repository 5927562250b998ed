"""Tests of the benchmark of offloading over a slow link: the emulated streams, the figures, and the program, small."""

import json
import time
from pathlib import Path

import pytest
import torch
from jobs import run_job
from slow_link import Base, base_of, configure, main, measure, parse_arguments, waits_of
from slow_streams import Copy, Log, Phase, SlowLink, SlowLinkCommunicator, Wait

TINY = (
    "--num-layers 2 --hidden-size 32 --heads 2 --seq-length 8 --vocab-size 64 --bucket-size 4096 --block-ms 0.2"
    " --update-ns 1 --rounds 1 --steps 1"
)


def test_copies_follow_each_other_and_take_bytes_by_bandwidth() -> None:
    link = SlowLink()
    link.bandwidth = 8000.0
    away, back = link.streams
    source, targets = torch.arange(10.0), [torch.zeros(10) for _ in range(3)]
    arrivals = [stream.copy(target, source) for stream, target in zip((away, away, back), targets, strict=True)]
    with link.in_phase("backward"):
        arrivals[1].finish()
    assert torch.equal(targets[0], source) and torch.equal(targets[1], source)
    log = link.take()
    first, second, other = log.copies
    assert first.ended - first.begun == second.ended - second.begun == pytest.approx(0.005)
    assert second.begun == first.ended and other.begun == other.queued < first.ended
    (wait,) = log.waits
    assert wait.copy is second and wait.phase == "backward" and wait.ended >= second.ended


def test_the_device_waits_behind_the_hosts_update() -> None:
    """A device's wait does not keep the host, unless it waits itself; the phase ends when the device may go on."""
    link = SlowLink()
    link.bandwidth = 1000.0
    source, target = torch.ones(5), torch.zeros(5)
    with link.in_phase("update"):
        link.streams[1].copy(target, source).wait()
        updated = time.perf_counter()
    log = link.take()
    assert log.copies[0].ended > updated and log.phases[0].ended >= log.copies[0].ended
    assert torch.equal(target, source)


def test_a_gather_runs_after_the_copy_that_it_follows() -> None:
    link = SlowLink()
    link.bandwidth = 1000.0
    communicator = SlowLinkCommunicator(link)
    source, part, whole = torch.ones(5), torch.zeros(5), torch.zeros(5)
    arrival = link.streams[1].copy(part, source)
    with arrival.ahead():
        work = communicator.all_gather_into(whole, part)
    assert not whole.any()
    work.wait()
    assert torch.equal(whole, source)


def test_figures_of_steps() -> None:
    base = Base(forward=2.0, backward=4.0, rest=1.0, away=30, back=20, back_in_backward=0)
    assert base.computation == 7.0 and base.transfer(10) == 5.0
    assert base.floor(10) == 4.0 + 3.0  # all copies are hidden
    assert base.floor(5) == 6.0 + 4.0  # 30 bytes beside backward, 20 beside the rest
    assert base._replace(back_in_backward=10).floor(2.5) == 12.0 + 4.0

    away = Copy("to the host", 30, "backward", 1.0, 1.0, 1.5)
    log = Log()
    log.copies = [away, Copy("to the device", 20, "update", 5.0, 5.0, 5.25)]
    log.phases = [Phase("forward", 0.0, 1.0), Phase("backward", 1.0, 4.0)]
    found = base_of([(7.0, log)])
    assert found == Base(1.0, 2.5, 7.0 - 0.75 - 3.5, 30, 20, 0)
    log.waits = [Wait(away, "the last gradients", "backward", 1.0, 2.0)] * 2
    assert log.seconds("backward") == 1.0
    (row,) = waits_of([log, Log()])
    assert (row.number, row.seconds, row.longest) == (1.0, 1.0, 1.0)


@pytest.mark.gloo
def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["slow_link.py"])
    words = [
        *TINY.split(),
        "--shares",
        "0.5",
        "8",
        "--cases",
        "stage 2, optimizer",
        "stage 3, optimizer and parameters",
    ]
    assert main([*words, "--traces", str(tmp_path / "traces"), "--output", str(tmp_path / "out.md")]) == 0
    page, record = (tmp_path / "out.md").read_text(), json.loads((tmp_path / "out.json").read_text())
    assert capsys.readouterr().out == page
    rows = record["systems"]
    assert len(rows) == 4
    for name, row in rows.items():
        # A gradient leaves once, in fp32; weights come back once, or to every gather.
        assert row["loaded_bytes"] == row["stored_bytes"] or "parameters" in name
        assert row["median_step_seconds"] >= 0.9 * row["stored_bytes"] / row["bandwidth"]
    waited = {wait["reason"] for wait in rows["stage 2, optimizer: 8"]["waits"]}
    assert {"the last gradients, before the norm", "updated weights, before their use"} <= waited
    events = json.loads((tmp_path / "traces" / "stage-2-optimizer-8.json").read_text())["traceEvents"]
    named = {event["name"] for event in events if event["ph"] == "X" and event["tid"] == 1}
    assert {"forward", "backward", "update", "waits: the last gradients, before the norm"} <= named
    arrows = [sorted(event["ph"] for event in events if event.get("id") == number) for number in range(3)]
    assert ["f", "s"] in arrows


@pytest.mark.gloo
def test_a_slow_link_changes_no_loss() -> None:
    """Whatever is read before it has come would change what is computed."""
    for case in ("stage 2, optimizer", "stage 3, optimizer", "stage 3, optimizer and parameters"):
        losses = []
        for share in ("0.001", "20"):
            options = parse_arguments([*TINY.split(), "--shares", share])
            ((outcome),) = run_job(1, measure, configure(case, options), options, device="cpu")
            losses.append(outcome.losses)
        assert losses[0] == losses[1] and len(losses[0]) == 8
