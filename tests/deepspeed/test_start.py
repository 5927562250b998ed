"""Tests how programs start: which backend is taken, and which optimizer where program and file both name it."""

import os
import warnings
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.deepspeed_programs import RATE, configuration, groups, net
from support.processes import run_ranks

import megazero.deepspeed as deepspeed
from megazero.errors import UsageError

RANKS = 2
DEEPSPEEDS: Mapping[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": RATE}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
}


def about_optimizers(**arguments: Any) -> tuple[Any, list[str]]:
    """Return the engine that the arguments make, and the notices that name an optimizer."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        engine, *_ = deepspeed.initialize(**arguments)
    return engine, [text for each in found if "optimizer" in (text := str(each.message)).lower()]


def one_optimizer(rank: int) -> None:
    """Check optimizers of the program and of the configuration, in both forms of a configuration."""
    launcher = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
    notice = ["optimizer: the one that the program passes to initialize takes its place"]
    with patch.dict(os.environ, launcher):
        for content in (dict(DEEPSPEEDS), configuration(1)):
            model = net()
            sgd = torch.optim.SGD(model.parameters(), lr=0.5)
            engine, notices = about_optimizers(model=model, optimizer=sgd, config=content)
            assert engine.optimizer is sgd and engine.get_lr() == [0.5]
            assert notices == (notice if rank == 0 else [])
            engine.destroy()
            # The configuration's optimizer over param groups of the program's is one optimizer, not two.
            model = net()
            engine, notices = about_optimizers(model=model, model_parameters=groups(model), config=content)
            assert engine.get_lr() == [RATE, RATE / 2] and notices == []
            engine.destroy()
        decoupled = {"type": "SGD", "lr": 0.1, "decoupled_lr": 0.5, "decoupled_parameters": ["outer"]}
        model = net()
        with pytest.raises(UsageError, match=r"optimizer.decoupled_lr: 0.5 beside(?s:.*)a param group with that lr"):
            deepspeed.initialize(
                model=model, model_parameters=groups(model), config=configuration(1, optimizer=decoupled)
            )


@pytest.mark.gloo
def test_one_optimizer() -> None:
    run_ranks(RANKS, one_optimizer)


@pytest.mark.skipif(torch.cuda.is_available(), reason="nccl stays with a GPU")
def test_nccl_is_gloo_on_a_machine_without_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """Published scripts name it always."""
    with patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}):
        try:
            deepspeed.init_distributed("nccl")
            assert dist.get_backend() == "gloo"
        finally:
            dist.destroy_process_group()
    told = "dist_backend=nccl: PyTorch sees no GPU on this machine, so gloo is used"
    assert capsys.readouterr().out.splitlines() == [told]
