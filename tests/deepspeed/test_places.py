"""Tests that the paths from which DeepSpeed programs import are there, without `install_as_deepspeed`."""

import subprocess
import sys

import pytest

import megazero.deepspeed as deepspeed
from megazero.errors import UsageError

# What training scripts import from below deepspeed.runtime, by how often it is found in public ones.
IMPORTS = """
from megazero.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, GatheredParameters, Init
from megazero.deepspeed.runtime.engine import DeepSpeedEngine
from megazero.deepspeed.runtime.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from megazero.deepspeed.runtime.utils import clip_grad_norm_, move_to_device, see_memory_usage, set_random_seed
from megazero.deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
from megazero.deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_live
from megazero.deepspeed.runtime.zero.config import ZeroStageEnum
from megazero.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from megazero.deepspeed.runtime.zero.tiling import TiledLinear
from megazero.deepspeed.runtime.dataloader import RepeatingLoader
from megazero.deepspeed.runtime.activation_checkpointing import checkpointing
from megazero.deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from megazero.deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from megazero.deepspeed.pipe import PipelineModule
import megazero.deepspeed.runtime.activation_checkpointing.checkpointing as same
import megazero.deepspeed.utils
assert same is checkpointing and megazero.deepspeed.utils.RepeatingLoader is RepeatingLoader
assert ZeroStageEnum.weights == 3 and OffloadDeviceEnum("cpu") is OffloadDeviceEnum.cpu
"""


@pytest.mark.long
def test_paths_that_programs_import_from() -> None:
    """They are there in a new process, where nothing else has been imported."""
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)


def test_the_rest_is_named() -> None:
    with pytest.raises(ImportError, match=r"megazero\.deepspeed\.runtime\.fp16"):
        from megazero.deepspeed.runtime.fp16.loss_scaler import LossScaler  # noqa: F401
    with pytest.raises(ImportError, match="MEMORY_OPT_ALLREDUCE_SIZE"):
        from megazero.deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE  # noqa: F401


def test_pipelines_are_refused_when_they_are_used() -> None:
    assert not isinstance(object(), deepspeed.pipe.PipelineModule)
    for name in ("PipelineModule", "LayerSpec", "TiedLayerSpec", "ProcessTopology", "PipeModelDataParallelTopology"):
        with pytest.raises(UsageError, match=rf"(?s)deepspeed\.pipe\.{name}.*not cut into stages"):
            getattr(deepspeed.pipe, name)(layers=[])
