"""Tests the calls of Accelerate and transformers' Trainer, and the programs of their page where both are installed."""

import glob
import importlib.metadata
import os
import re
import subprocess
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from support.pages import block_with
from support.processes import run_ranks
from support.source_tree import ROOT
from torch import Tensor, nn

from megazero.deepspeed.install import install_as_deepspeed

# Folders of this name, such as that of these tests, have no origin.
IS_INSTALLED = (SPEC := find_spec("deepspeed")) is not None and SPEC.origin is not None
RANKS, LR, CLIP, DECAY = 2, 0.05, 0.2, 0.1
ACCUMULATION = 2
PASSES = (2, 1, 2)  # of each step: a data loader may end in the middle of one
LOOKING = ("accelerate", "deepspeed", "transformers")


class Trained(NamedTuple):
    """The weights after all steps, the gradient norm of each, and the weights of a state_dict of the engine."""

    weights: dict[str, Tensor]
    norms: list[float]
    state: dict[str, Tensor]


def model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def batch(number: int, rank: int) -> Tensor:
    return torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * number + rank))


def configuration(stage: int) -> dict[str, Any]:
    """Return what a DeepSpeedPlugin makes of its arguments."""
    off = {"device": "none", "nvme_path": None}
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": ACCUMULATION,
        "train_batch_size": 3 * ACCUMULATION * RANKS,
        "gradient_clipping": CLIP,
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": off,
            "offload_param": off,
            "stage3_gather_16bit_weights_on_model_save": False,
            "stage3_param_persistence_threshold": 0,
        },
        "steps_per_print": float("inf"),
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
    }


def call_as_accelerate(rank: int, stage: int, folder: Path) -> Trained:
    """Train, save in the middle, and go on from there with a new engine."""
    hidden = [name for name in sys.modules if name.split(".")[0] in LOOKING]
    launcher = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
    with (
        patch.dict(sys.modules),
        patch.object(sys, "meta_path", list(sys.meta_path)),
        patch.dict(os.environ, launcher),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for name in hidden:
            del sys.modules[name]
        install_as_deepspeed()
        return train(rank, stage, folder)


def train(rank: int, stage: int, folder: Path) -> Trained:
    deepspeed: Any = import_module("deepspeed")
    assert importlib.metadata.version("deepspeed") == deepspeed.__version__
    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    norms, number = [], 0
    for step, passes in enumerate(PASSES):
        if step in (0, 2):
            module = model()
            optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=DECAY)
            assert type(optimizer).__name__ not in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
            engine, given, _, scheduler = deepspeed.initialize(
                model=module, optimizer=optimizer, config_params=configuration(stage)
            )
            assert given is optimizer and scheduler is None and isinstance(engine, deepspeed.DeepSpeedEngine)
            assert engine.config.get("zero_optimization", {}).get("stage") == stage
        if step == 2:
            assert [Path(path).name for path in glob.glob(f"{folder}/global_step*")] == ["global_step2"]
            path, _ = engine.load_checkpoint(
                folder, load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True
            )
            assert path is not None and Path(path).samefile(folder / "global_step2")
            engine.load_checkpoint(folder, "global_step2")
        for index in range(passes):
            is_last = index + 1 == passes
            engine.set_gradient_accumulation_boundary(is_boundary=is_last)
            engine.backward(engine(batch(number, rank).float()).square().mean())
            number += 1
            if is_last:
                engine.step()
        norms.append(engine.get_global_grad_norm())
        assert given.overflow is False
        if step == 1:
            engine.save_checkpoint(folder)
            engine.destroy()
    assert engine.zero_gather_16bit_weights_on_model_save()
    state = engine._zero3_consolidated_16bit_state_dict()
    copies = import_module("deepspeed.checkpoint.utils").clone_tensors_for_torch_save(state)
    masters = {name: deepspeed.utils.safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    engine.destroy()
    return Trained(masters, norms, copies)


def train_plain() -> tuple[dict[str, Tensor], list[float]]:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=DECAY)
    norms, number = [], 0
    for passes in PASSES:
        optimizer.zero_grad()
        for _ in range(passes):
            for rank in range(RANKS):
                (module(batch(number, rank)).square().mean() / ACCUMULATION / RANKS).backward()
            number += 1
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), CLIP)))
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}, norms


@pytest.mark.gloo
@pytest.mark.skipif(IS_INSTALLED, reason="DeepSpeed itself is installed")
@pytest.mark.parametrize("stage", [0, 3])
def test_the_calls_that_accelerate_makes(stage: int, tmp_path: Path) -> None:
    """The model becomes fp32, DeepSpeed's format without fp16 and bf16."""
    weights, norms = train_plain()
    for found in run_ranks(RANKS, call_as_accelerate, stage, tmp_path):
        assert found.norms == pytest.approx(norms, rel=1e-5)
        for values in (found.weights, found.state):
            assert values.keys() == weights.keys()
            for name, value in weights.items():
                torch.testing.assert_close(values[name].double(), value, rtol=1e-5, atol=1e-5)


# --- with Accelerate and transformers -----------------------------------------------------------------------------

needs_accelerate = pytest.mark.skipif(
    find_spec("accelerate") is None or find_spec("transformers") is None,
    reason="accelerate and transformers are not installed",
)


def run_page(folder: Path, name: str, edits: dict[str, str] | None = None) -> str:
    """Run the commands of the page that write and start runs/NAME.py, and return what they print."""
    block = block_with("docs/accelerate.md", f"cat >runs/{name}.py").text
    launcher = f"{sys.executable} -m torch.distributed.run"
    for old, new in {"torchrun": launcher, **(edits or {})}.items():
        assert old in block
        block = block.replace(old, new)
    (folder / "runs").mkdir(exist_ok=True)
    search_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"}
    command = ["bash", "-ec", block]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@needs_accelerate
@pytest.mark.gloo
def test_both_loops_of_the_page_train_as_in_plain_torch(tmp_path: Path) -> None:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 1))
    data = torch.randn(32, 6)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    expected = []
    for _ in range(3):
        for x in data.split(4 * RANKS):
            optimizer.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
        expected.append(loss.item())
    for name in ("accelerate_loop", "accelerate_plugin"):
        found = [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+)", run_page(tmp_path, name))]
        assert found == pytest.approx(expected, abs=2e-6), name


@needs_accelerate
@pytest.mark.gloo
def test_the_trainer_of_the_page_trains_and_resumes_as_in_one_process(tmp_path: Path) -> None:
    alone = {
        "on_cpu = not torch.cuda.is_available()": "on_cpu = False",
        "    deepspeed=config,": "    use_cpu=True,",
        "per_device_train_batch_size=2": "per_device_train_batch_size=4",
        "--nproc-per-node 2": "--nproc-per-node 1",
    }
    found = [re.findall(r"\d\.\d+", line) for line in run_page(tmp_path, "trainer").splitlines() if "losses" in line]
    (tmp_path / "runs" / "trainer").rename(tmp_path / "runs" / "trainer_before")
    plain = [
        re.findall(r"\d\.\d+", line) for line in run_page(tmp_path, "trainer", alone).splitlines() if "losses" in line
    ]
    assert len(found) == len(plain) == 2 and found[0] == found[1]
    assert [float(x) for x in found[0]] == pytest.approx([float(x) for x in plain[0]], abs=2e-5)
