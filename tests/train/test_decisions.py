"""Tests that a run decides once: before ranks meet, the same on every rank, and never again while nothing changes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launch import set_launcher
from support.small_runs import tiny_run
from torch.distributed import HashStore

from megazero.command_line.parse import from_yaml
from megazero.config.named import undecided, value_in
from megazero.config.run import RunConfig
from megazero.errors import ConfigError
from megazero.parallel.launch import Launch
from megazero.train.build import check_checkpoint
from megazero.train.decisions import Decision, decide_first, decided, kept
from megazero.train.program import pretrain
from megazero.train.start.check import check

ALONE = Launch(0, 1, 0)
AUTO: dict[str, Any] = {
    "recompute_granularity": "auto",
    "partition_activations": "auto",
    "checkpoint_in_cpu": "auto",
    "offload_optimizer": "auto",
    "contiguous_checkpointing": True,
    "zero_stage": 1,
}
FULL = Decision(
    {
        "recompute_granularity": "full",
        "partition_activations": False,
        "checkpoint_in_cpu": True,
        "offload_optimizer": "cpu",
    },
    ("because",),
)
NONE = Decision(
    {
        "recompute_granularity": "none",
        "partition_activations": False,
        "checkpoint_in_cpu": False,
        "offload_optimizer": "none",
    },
    (),
)


def _refuse(config: RunConfig, device: torch.device, launch: Launch) -> Decision:
    raise AssertionError("this run has decided already")


@pytest.mark.parametrize("decision", [FULL, NONE])
def test_a_run_keeps_its_decision(
    decision: Decision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_launcher(monkeypatch)
    config = tiny_run(**{**AUTO, "train_iters": 2, "save": str(tmp_path), "load": str(tmp_path)})
    assert pretrain(config, ALONE, check(config, ALONE), lambda *_: decision) == 0
    assert all(reason in capsys.readouterr().out for reason in decision.reasons)
    saved = from_yaml((tmp_path / "config.yaml").read_text(), origin="")
    assert {name: value_in(saved, name) for name in undecided(config)} == decision.values
    longer = replace(config, training=replace(config.training, train_iters=3))
    assert pretrain(longer, ALONE, check(longer, ALONE), _refuse) == 0
    word = decision.values["recompute_granularity"]
    printed = capsys.readouterr().out
    assert f"recompute_granularity auto: {word}, as before" in printed
    assert f"offload_optimizer auto: {decision.values['offload_optimizer']}, as before" in printed
    inputs = check(longer, ALONE)
    found = check_checkpoint(longer, inputs, 1)
    assert kept(longer, found, 1) is not None
    assert kept(longer, found, 2) is None
    changed = (
        replace(longer, training=replace(longer.training, micro_batch_size=1)),
        replace(longer, zero=replace(longer.zero, zero_stage=2)),
        replace(longer, activations=replace(longer.activations, recompute_num_layers=2)),
        replace(longer, checkpoint=replace(longer.checkpoint, finetune=True)),
    )
    again = [kept(each, found, 1) for each in changed]
    # Without recomputation its segments make no difference.
    assert [one is None for one in again] == [True, True, decision is FULL, True]


def test_the_first_rank_decides_for_all() -> None:
    config, asked = tiny_run(**AUTO), []

    def decide(config: RunConfig, device: torch.device, launch: Launch) -> Decision:
        asked.append(launch.rank)
        return FULL

    device, store = torch.device("cpu"), HashStore()
    decisions = [decide_first(config, None, device, Launch(rank, 3, rank), decide) for rank in range(3)]
    assert asked == [0] and decisions[1:] == [None, None]
    found = [decided(config, decision, store) for decision in decisions]
    assert [{name: value_in(one, name) for name in FULL.values} for one, _ in found] == [FULL.values] * 3
    assert {one.activations.contiguous_checkpointing for one, _ in found} == {True}
    assert [reasons for _, reasons in found] == [("because",)] * 3


def test_nothing_is_decided_where_all_is_given() -> None:
    config = tiny_run(recompute_granularity="selective")
    assert decide_first(config, None, torch.device("cpu"), ALONE, _refuse) is None
    assert decided(config, None, None) == (config, ())


def test_a_program_without_a_planner_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    set_launcher(monkeypatch)
    config = tiny_run(recompute_granularity="auto")
    with pytest.raises(ConfigError, match="recompute_granularity auto"):
        pretrain(config, ALONE, check(config, ALONE))
