"""Tests of the functions of `deepspeed.runtime.utils`."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from megazero.deepspeed.runtime.utils import clip_grad_norm_, move_to_device, see_memory_usage, set_random_seed
from megazero.errors import UsageError


def test_memory_is_printed_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    see_memory_usage("before the first step")
    assert capsys.readouterr().out == ""
    see_memory_usage("after it", force=True)
    out = capsys.readouterr().out
    assert out.startswith("after it | allocated ") and "of the process at most" in out and out.endswith("B\n")


def test_tensors_are_moved_however_nested() -> None:
    moved = move_to_device({"a": [torch.ones(2), "text"], "b": (torch.zeros(()),)}, "meta")
    assert moved["a"][0].device.type == moved["b"][0].device.type == "meta" and moved["a"][1] == "text"


def test_all_generators_are_seeded() -> None:
    def drawn() -> tuple[float, float, float]:
        set_random_seed(7)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert drawn() == drawn()


def test_gradients_are_clipped_as_by_torch() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_([parameter], 1.0).item() == pytest.approx(5.0)
    assert parameter.grad.tolist() == pytest.approx([0.6, 0.8])
    with pytest.raises(UsageError, match="mpu"):
        clip_grad_norm_([parameter], 1.0, mpu=object())
