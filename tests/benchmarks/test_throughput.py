"""Tests of the benchmark of throughput: figures of given steps, and the program, small, also with a pipeline."""

import json
from pathlib import Path

import pytest
from ceilings import Ceilings
from steps import Held, configuration_of
from throughput import SYSTEM, Timed, figures, layout, main, parse_arguments

from megazero.errors import ConfigError

TINY = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --micro-batch-size 2"
    " --lr 1e-2"
)


def timed(seconds: list[float], peak: int, allocated: int = 0) -> Timed:
    held = Held(1600, 0, 0, peak, 0, {"dp": 30, "tp": 10}, 100, {"parameters": peak})
    return Timed(Ceilings("fp32", {"torch": 1e9}, 1.0, 8), seconds, [3.0, 2.0, 1.0], allocated, held)


def test_figures_are_of_the_slowest_and_the_fullest() -> None:
    config = configuration_of(f"{TINY} --global-batch-size 8".split(), 2)
    found = figures(config, [timed([0.1, 0.4, 0.2], 50), timed([0.3, 0.1, 0.2], 70)], ["--lr", "1"], 1e10)
    assert found["step_seconds"] == [0.3, 0.4, 0.2] and found["median_step_seconds"] == 0.3
    assert found["tokens_per_step"] == 128 and found["tokens_per_second"] == pytest.approx(128 / 0.3)
    psi = 4 * 12 * 32 * 32 + 64 * 32
    assert found["flops_per_token"] == 6 * psi + 12 * 4 * 16 * 32
    rate = found["flops_per_token"] * 128 / 0.3 / 2
    assert found["model_flops_per_second"] == pytest.approx(rate)
    assert found["mfu_of_measured_ceiling"] == pytest.approx(rate / 1e9)
    assert found["mfu_of_data_sheet"] == pytest.approx(rate / 1e10)
    assert found["peak_bytes"] == found["ledger_peak_bytes"] == 70 and found["sent_bytes"] == 40
    assert found["state_bytes_per_parameter"] == 16.0 and found["settings"] == "--lr 1"


def test_the_allocator_knows_better_than_the_ledger() -> None:
    found = figures(configuration_of(TINY.split(), 1), [timed([1.0], 50, allocated=80)], [], None)
    assert found["peak_bytes"] == 80 and found["ledger_peak_bytes"] == 50 and found["mfu_of_data_sheet"] is None


def test_layouts() -> None:
    flags = f"{TINY} --pipeline-model-parallel-size 2 --zero-stage 2 --global-batch-size 8"
    assert layout(configuration_of(flags.split(), 4), 4) == (
        "pipeline 2 x data 2 x tensor 1, ZeRO stage 2, 2 micro-batches of 2"
    )
    assert layout(configuration_of(TINY.split(), 1), 1).endswith(", 1 micro-batch of 2")


def test_flags_stand_behind_two_dashes() -> None:
    options, flags = parse_arguments(["--world-size", "2", "--", "--preset", "gpt2-124m", "--bf16"])
    assert options.world_size == 2 and options.steps == 20 and flags == ["--preset", "gpt2-124m", "--bf16"]
    assert parse_arguments(["--steps", "3"])[1] == []


def test_flags_that_make_no_run_are_refused() -> None:
    with pytest.raises(ConfigError, match="--num-attention-heads"):
        main(["--", *TINY.split(), "--num-attention-heads", "5"])


@pytest.mark.gloo
def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["throughput.py"])
    layouts = {
        "plain": ("1", "--global-batch-size 8"),
        "pipeline": ("2", "--global-batch-size 8 --pipeline-model-parallel-size 2"),
    }
    losses = {}
    for name, (world_size, flags) in layouts.items():
        own = f"--device cpu --world-size {world_size} --steps 3 --warm-up 2 --output {tmp_path / name}.md"
        assert main([*own.split(), "--", *TINY.split(), *flags.split()]) == 0
        assert capsys.readouterr().out == (tmp_path / f"{name}.md").read_text()
        record = json.loads((tmp_path / f"{name}.json").read_text())
        system = record["systems"][SYSTEM]
        assert record["world_size"] == int(world_size) and record["model"]["name"] == "4 x 32"
        assert system["tokens_per_step"] == 8 * 16 and len(system["step_seconds"]) == 3
        assert sum(system["peak_bytes_by_category"].values()) == system["ledger_peak_bytes"] > 0
        losses[name] = system["losses"]
    assert losses["plain"][-1] < losses["plain"][0] and len(losses["plain"]) == 5
    assert losses["pipeline"] == pytest.approx(losses["plain"], rel=1e-5)
    assert json.loads((tmp_path / "plain.json").read_text())["systems"][SYSTEM]["state_bytes_per_parameter"] == 16.0


@pytest.mark.gloo
def test_fewer_steps_where_time_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit of 0 leaves one measured step; the run is in fp16, whose first steps overflow and are skipped."""
    monkeypatch.setattr("sys.argv", ["throughput.py"])
    own = f"--device cpu --steps 1000000 --warm-up 1 --time-limit 0 --output {tmp_path / 'out.md'}"
    assert main([*own.split(), "--", *TINY.split(), "--fp16"]) == 0
    record = json.loads((tmp_path / "out.json").read_text())
    assert len(record["systems"][SYSTEM]["step_seconds"]) == 1 and record["precision"] == "fp16"
