"""Tests that what DeepSpeed has and megazero lacks raises an error that names it, and small parts of the package."""

import argparse
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.deepspeed_programs import Points, collate, configuration, micro_batch, net
from support.processes import run_ranks
from torch import nn
from torch.utils.data import IterableDataset

import megazero.deepspeed as deepspeed
from megazero.deepspeed import scheduler_state
from megazero.deepspeed.data import RepeatingLoader
from megazero.errors import UsageError, UserError


def test_missing_names() -> None:
    for name in ("PipelineModule", "init_inference", "tp_model_init", "no_such_thing"):
        assert not hasattr(deepspeed, name)
        with pytest.raises(UsageError, match=rf"megazero\.deepspeed\.{name}"):
            getattr(deepspeed, name)
    with pytest.raises(ImportError, match="PipelineModule"):
        from megazero.deepspeed import PipelineModule  # noqa: F401
    assert not hasattr(deepspeed.comm, "log_summary") and not hasattr(deepspeed.get_accelerator(), "Stream")
    assert {"initialize", "comm", "zero"} <= set(dir(deepspeed))


def test_arguments() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    assert vars(parser.parse_args([])) == {"deepspeed": False, "deepspeed_config": None}
    given = parser.parse_args(["--deepspeed", "--deepspeed_config", "a.json"])
    assert vars(given) == {"deepspeed": True, "deepspeed_config": "a.json"}


def test_the_accelerator_of_a_machine_without_a_gpu() -> None:
    device = deepspeed.get_accelerator()
    if device.communication_backend_name() == "nccl":
        pytest.skip("there is a GPU")
    device.set_device(0)
    device.synchronize()
    assert (device.device_name(), device.device_name(1), device.current_device_name()) == ("cpu",) * 3
    assert device.is_available() and device.device_count() == 1 and device.memory_allocated() == 0
    assert torch.bfloat16 in device.supported_dtypes()


def test_the_state_of_a_scheduler_comes_back() -> None:
    state = {"milestones": Counter({3: 1, 5: 2}), "rates": (0.1, [0.2, None]), "name": "x"}
    again = scheduler_state.from_json(scheduler_state.to_json(state))
    assert again == state and type(again["milestones"]) is Counter and type(again["rates"]) is tuple


def test_a_repeating_loader_begins_again() -> None:
    loader = RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]


class Stream(IterableDataset[int]):
    """Samples without an index."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def refused(rank: int, folder: str) -> None:
    """Check every refusal around one engine."""
    launcher = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    content = configuration(2, gradient_accumulation_steps=2, dataloader_drop_last=True)

    def expect(match: str, **arguments: Any) -> None:
        with pytest.raises(UsageError, match=match):
            deepspeed.initialize(**{"model": net(), "config": content, **arguments})

    with patch.dict(os.environ, launcher):
        expect("without a model", model=None)
        expect("mesh_param", mesh_param=(1, 2))
        expect("0 configurations", config=None)
        expect("2 configurations", config_params=content)
        expect("2 configurations", args=SimpleNamespace(deepspeed_config="a.json"))
        expect("config of type int", config=3)
        expect("args.local_rank 7", args=SimpleNamespace(local_rank=7))
        other = torch.optim.SGD(net().parameters(), lr=0.1)
        expect("differ from the optimizer's", optimizer=other, model_parameters=net().parameters())
        with (
            pytest.raises(UserError, match="dist_backend=ccl"),
            patch("megazero.deepspeed.comm.is_initialized") as is_there,
        ):
            is_there.return_value = False
            deepspeed.init_distributed("ccl")
        with pytest.raises(TypeError, match="pipeline"):
            deepspeed.initialize(model=net(), config=content, pipeline=2)
        engine, _, loader, schedule = deepspeed.initialize(
            None, net(), None, None, Points(), config=content, collate_fn=collate
        )
        assert loader is not None and len(loader) == 3 and schedule is None  # the fourth micro-batch is left out
        for match, call in {
            "exclude_frozen": lambda: engine.save_checkpoint(folder, exclude_frozen_parameters=True),
            "save_latest": lambda: engine.save_checkpoint(folder, save_latest=False),
            "client_state": lambda: engine.save_checkpoint(folder, client_state={"lr_scheduler": 1}),
            "load_module_strict": lambda: engine.load_checkpoint(folder, load_module_strict=False),
            "custom_load_fn": lambda: engine.load_checkpoint(folder, custom_load_fn=print),
            "save_16bit_model": lambda: engine.save_16bit_model(folder, exclude_frozen_parameters=True),
            "Stream": lambda: engine.deepspeed_io(Stream()),
            "device='nvme'": lambda: engine.optimizer.offload_states(device="nvme"),
            "engine.no_such_thing": lambda: engine.no_such_thing,
            r"set_train_batch_size\(6\) with micro-batches of 2": lambda: engine.set_train_batch_size(6),
            "lr_kwargs": lambda: engine.step(lr_kwargs={"metrics": 1}),
        }.items():
            with pytest.raises(UsageError, match=match):
                call()
        for _ in range(2):
            engine.backward(engine(*micro_batch(0, 0, rank)))
        with pytest.raises(UsageError, match="after 2 backward passes"):
            engine.step()
        with pytest.raises(UsageError, match="set_train_batch_size between"):
            engine.set_train_batch_size(8)
        engine.zero_grad()
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(engine(*micro_batch(0, 0, rank)))
        engine.step()
        engine.set_gradient_accumulation_boundary(True)
        with pytest.raises(UsageError, match="boundary that was set after"):
            engine.step()
        engine.allreduce_gradients()
        engine.step()
        assert engine.was_step_applied() and (engine.global_steps, engine.micro_steps) == (1, 2)
        assert isinstance(engine.module, nn.Module) and engine.inner is engine.module.inner
        engine.destroy()


@pytest.mark.gloo
def test_what_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(2, refused, str(tmp_path))
