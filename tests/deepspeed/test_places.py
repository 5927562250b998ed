"""Tests that the paths from which DeepSpeed programs import are there, without `install_as_deepspeed`."""

import pytest

import megazero.deepspeed as deepspeed
from megazero.errors import UsageError


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
