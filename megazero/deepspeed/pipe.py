"""The classes of DeepSpeed's pipelines, which are not there; programs import them though they may not use them."""

from typing import Any

from torch import nn

from megazero.deepspeed.missing import REASONS, refuse


class _Missing:
    """A class that raises UsageError when an object of it is made."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        raise refuse(f"deepspeed.pipe.{type(self).__name__}", REASONS["pipe"], "initialize(model=...), ZeRO stage 3")


class PipelineModule(_Missing, nn.Module):
    """DeepSpeed's model in stages; no model is an instance of it."""


class LayerSpec(_Missing):
    """DeepSpeed's description of a layer of such a model."""


class TiedLayerSpec(LayerSpec):
    """DeepSpeed's description of a layer with parameters of another one."""


class ProcessTopology(_Missing):
    """DeepSpeed's grid of ranks."""


class PipeDataParallelTopology(ProcessTopology):
    """DeepSpeed's grid of two axes."""


class PipeModelDataParallelTopology(ProcessTopology):
    """DeepSpeed's grid of three axes."""
