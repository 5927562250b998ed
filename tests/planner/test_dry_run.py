"""Tests that a dry rank takes and sends what a real one does, to the byte, on CPUs."""

from collections.abc import Mapping
from typing import Any

import pytest
from support.planned_step import differences
from support.processes import run_ranks

from megazero.config.optimizers import OPTIMIZERS, RUN_NAMES

pytestmark = pytest.mark.gloo

CHECKPOINTS = {"recompute_granularity": "full", "partition_activations": True, "contiguous_checkpointing": True}
LAYOUTS: Mapping[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "alone, dropout": ({"global_batch_size": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1}, (1,)),
    "stage 3, checkpoints in host memory": (
        {"global_batch_size": 4, "zero_stage": 3, "checkpoint_in_cpu": True, "recompute_granularity": "full"},
        (2,),
    ),
    "stage 2, optimizer in host memory, bf16": (
        {"global_batch_size": 8, "zero_stage": 2, "offload_optimizer": "cpu", "precision": "bf16"},
        (2,),
    ),
    "stage 2, Adafactor": ({"global_batch_size": 4, "zero_stage": 2, "optimizer": "adafactor"}, (2,)),
    "stage 2, AdamW8bit": ({"global_batch_size": 4, "zero_stage": 2, "optimizer": "adamw8bit"}, (2,)),
    "stage 1, NAdam, fp16": (
        {"global_batch_size": 4, "zero_stage": 1, "optimizer": "nadam", "precision": "fp16"},
        (2,),
    ),
    "tensor parallel, partitioned checkpoints": (
        {"global_batch_size": 2, "tensor_model_parallel_size": 2, **CHECKPOINTS},
        (2,),
    ),
    "pipeline, sequence parallel, two nodes": (
        {
            "global_batch_size": 4,
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
            "zero_stage": 1,
            "num_layers": 2,
        },
        (2, 2),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dry_rank_takes_what_a_real_one_does(layout: str) -> None:
    settings, per_node = LAYOUTS[layout]
    if OPTIMIZERS[RUN_NAMES[settings.get("optimizer", "adam")]].package:
        pytest.importorskip("bitsandbytes", reason="the kernels are those of bitsandbytes")
    found = run_ranks(sum(per_node), differences, settings, per_node)
    assert found == [[]] * sum(per_node)
