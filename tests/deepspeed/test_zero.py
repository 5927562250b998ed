"""Tests DeepSpeed's names around ZeRO: estimates, and what is refused."""

import io
import logging
from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from torch import nn

from megazero.deepspeed import utils, zero
from megazero.deepspeed.missing import MissingNameError
from megazero.errors import UsageError


def test_names_that_are_not_there() -> None:
    assert not hasattr(zero, "MiCS_Init")
    with pytest.raises(MissingNameError, match="all data-parallel ranks"):
        _ = zero.MiCS_Init
    with pytest.raises(MissingNameError, match="the engine's"):
        _ = utils.groups
    with pytest.raises(ImportError):
        import_module("megazero.deepspeed.utils.groups")


def test_unregistering_is_refused() -> None:
    with pytest.raises(UsageError, match="unregister_external_parameter"):
        zero.unregister_external_parameter(nn.Linear(2, 2), nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize(
    ("estimate", "stage", "bf16"),
    [
        # 4 GPUs, each with a quarter of gradients, master weights and moments (2 + 4 + 8 bytes for each parameter)
        (zero.estimate_zero2_model_states_mem_needs_all_live, 2, 2 * 1024 + 1024 // 4 * (2 + 4 + 8)),
        (zero.estimate_zero3_model_states_mem_needs_all_live, 3, 1024 // 4 * (2 + 2 + 4 + 8) + 2 * 768),
    ],
)
def test_estimates_of_memory(
    estimate: Callable[..., None], stage: int, bf16: int, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = nn.ModuleList([nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)])
    estimate(layers, num_gpus_per_node=2, num_nodes=2)
    text = capsys.readouterr().out.splitlines()
    assert text[0].startswith(f"ZeRO stage {stage} with AdamW: model states on each of 2 x 2 GPUs for 1024 parameters")
    assert [line.split()[0] for line in text[1:]] == ["bf16", "fp16", "fp32"]
    assert text[1].startswith(f"  bf16  {bf16 / 1024:.1f} KiB: ")


def test_logging_and_copies() -> None:
    told = io.StringIO()
    handler = logging.StreamHandler(told)
    utils.logger.addHandler(handler)
    utils.logger.setLevel(logging.INFO)
    try:
        utils.log_dist("seen", ranks=[0])
        utils.log_dist("seen on all", ranks=[-1])
        utils.log_dist("not seen", ranks=[1])
    finally:
        utils.logger.removeHandler(handler)
        utils.logger.setLevel(logging.NOTSET)
    assert told.getvalue() == "[Rank 0] seen\n[Rank 0] seen on all\n"
    flat = torch.arange(6.0)
    copied = utils.clone_tensors_for_torch_save({"state": [flat[2:4], 3]})
    assert copied["state"][1] == 3 and copied["state"][0].untyped_storage().nbytes() == 8
    assert torch.equal(copied["state"][0], flat[2:4])
