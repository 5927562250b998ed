"""GatheredParameters: reading and changing weights outside a forward, on all ranks, in every ZeRO stage."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.awkward import (
    Awkward,
    Options,
    alone,
    batch,
    engine_around,
    full_state,
    loss_of,
    make_engine,
    make_model,
    take_step,
    train_engine,
)
from support.lonely import CASES, TIMEOUT_SECONDS
from support.processes import mesh_in_worker, run_ranks
from support.training import Saved, assemble, boxes
from torch import Tensor, nn

from megazero.errors import UsageError
from megazero.zero.engine import Engine
from megazero.zero.gathered import GatheredParameters, register_external_parameter
from megazero.zero.guard import PartitionedParameter

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train(engine: Engine, model: Awkward, rank: int, steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        engine.begin_step()
        x, y = batch(step, dtype)
        engine.backward(loss_of(model, x.chunk(2)[rank], y.chunk(2)[rank]), is_last=True)
        take_step(engine)


class Read(NamedTuple := __import__("typing").NamedTuple):
    pass
