"""Each rule about recomputation is broken by its own row of the table, and the values it names as legal satisfy it."""

from typing import Any

from support.configs import make_run
from support.each import each

from megazero.rules.run import check

FULL = {"recompute_granularity": "full"}


@each(
    "settings",
    [
        {"recompute_granularity": "selective"},
        FULL,
        {**FULL, "recompute_method": "block", "recompute_num_layers": 2},
        {**FULL, "partition_activations": "auto", "checkpoint_in_cpu": True},
        {**FULL, "contiguous_checkpointing": True, "number_checkpoints": 1},
        {**FULL, "synchronize_each_layer": True, "profile_backward": True},
        {"recompute_granularity": "auto", "partition_activations": "auto", "zero_stage": 1, "offload_optimizer": "cpu"},
        {"partition_activations": False, "checkpoint_in_cpu": False, "logits_chunk_bytes": 1},
    ],
)
def test_legal(settings: dict[str, Any]) -> None:
    assert check(make_run(**settings), 1) == ()


def test_recomputed_layers_are_layers_of_the_model() -> None:
    (found,) = check(make_run(recompute_num_layers=5, **FULL), 1)
    assert found.given == "--recompute-num-layers 5 --num-layers 2"
    assert found.legal == "--recompute-num-layers 2, --num-layers 5"
    assert check(make_run(recompute_num_layers=2, **FULL), 1) == ()
    assert check(make_run(recompute_num_layers=5, num_layers=5, **FULL), 1) == ()
