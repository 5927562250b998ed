"""Rules about recomputation: each breaks on its own row, and what it calls legal mends it."""

from typing import Any

import pytest
from support.configs import make_run

from megazero.config.engine_sections import ActivationConfig
from megazero.rules.activations import count_has_an_arena
from megazero.rules.run import advice, check

FULL = {"recompute_granularity": "full"}


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute_granularity": "selective"},
        FULL,
        {**FULL, "recompute_method": "block", "recompute_num_layers": 2},
        {**FULL, "partition_activations": "auto", "checkpoint_in_cpu": True},
        {**FULL, "contiguous_checkpointing": True, "number_checkpoints": 1},
        {**FULL, "synchronize_each_layer": True, "profile_backward": True},
        {"partition_activations": False, "checkpoint_in_cpu": False, "logits_chunk_bytes": 1},
    ],
)
def test_legal(settings: dict[str, Any]) -> None:
    assert check(make_run(**settings), 1) == ()


@pytest.mark.parametrize(
    ("setting", "value", "given"),
    [
        ("recompute_method", "uniform", "--recompute-method uniform"),
        ("recompute_num_layers", 1, "--recompute-num-layers 1"),
        ("partition_activations", True, "--partition-activations"),
        ("partition_activations", "auto", "--partition-activations auto"),
        ("checkpoint_in_cpu", True, "--checkpoint-in-cpu"),
        ("checkpoint_in_cpu", "auto", "--checkpoint-in-cpu auto"),
        ("contiguous_checkpointing", True, "--contiguous-checkpointing"),
        ("synchronize_each_layer", True, "--synchronize-each-layer"),
        ("profile_backward", True, "--profile-backward"),
    ],
)
@pytest.mark.parametrize("granularity", ["none", "selective"])
def test_checkpoints_are_of_full_recomputation(setting: str, value: Any, given: str, granularity: str) -> None:
    (found,) = check(make_run(**{setting: value}, recompute_granularity=granularity), 1)
    assert found.given == f"{given} with --recompute-granularity {granularity}"
    flag = given.split()[0]
    instead = f"{flag} false" if value in (True, "auto") and not setting.startswith("recompute") else f"without {flag}"
    assert found.legal == f"--recompute-granularity full, or {instead}" and found.rule
    assert check(make_run(**{setting: value}, **FULL), 1) == ()


def test_all_that_needs_full_recomputation_is_one_finding() -> None:
    settings = {"number_checkpoints": 3, "contiguous_checkpointing": True, "partition_activations": True}
    (found,) = check(make_run(**settings), 1)
    assert found.given == (
        "--partition-activations --contiguous-checkpointing --number-checkpoints 3 with --recompute-granularity none"
    )
    off = "--partition-activations false, --contiguous-checkpointing false, without --number-checkpoints"
    assert found.legal == f"--recompute-granularity full, or {off}"


def test_recomputed_layers_are_layers_of_the_model() -> None:
    (found,) = check(make_run(recompute_num_layers=5, **FULL), 1)
    assert found.given == "--recompute-num-layers 5 --num-layers 2"
    assert found.legal == "--recompute-num-layers 2, --num-layers 5"
    assert check(make_run(recompute_num_layers=2, **FULL), 1) == ()
    assert check(make_run(recompute_num_layers=5, num_layers=5, **FULL), 1) == ()


def test_a_count_has_an_arena() -> None:
    (found,) = check(make_run(number_checkpoints=3, **FULL), 1)
    assert found.given == "--number-checkpoints 3 without --contiguous-checkpointing"
    assert found.legal == "--contiguous-checkpointing, or leave out --number-checkpoints"
    (spelt,) = count_has_an_arena(ActivationConfig(number_checkpoints=3), lambda name: f"<{name}>")
    assert spelt.given == "<number_checkpoints> 3 without <contiguous_checkpointing>"


def test_advice_where_there_is_nothing_to_partition_over() -> None:
    (line,) = advice(make_run(partition_activations=True, **FULL), 2)
    assert line.startswith("--partition-activations: ") and "nothing to partition over" in line
    assert advice(make_run(partition_activations=True, tensor_model_parallel_size=2, **FULL), 2) == ()
    assert advice(make_run(partition_activations="auto", **FULL), 2) == ()
    assert len(advice(make_run(partition_activations=True, precision="bf16", global_batch_size=8, **FULL), 1)) == 2
