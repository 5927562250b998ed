"""The weights of a checkpoint with adapters as those of a model without: W + (alpha / r) B A for each adapted layer."""

from dataclasses import replace
from typing import Protocol

from torch import Tensor

from megazero.checkpoint.reader import Checkpoint
from megazero.config.derived import lora_scale
from megazero.config.model import ModelConfig
from megazero.tensor_parallel.adapters import merged


class FullWeights(Protocol):
    """A source of whole weights by name: a checkpoint, or one whose adapters are merged."""

    def read_full(self, parameter: str) -> Tensor:
        """Return the full logical tensor."""


class MergedCheckpoint:
    """The weights of a checkpoint, each with its adapter merged into it in float32 or wider when it is read."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self._checkpoint = checkpoint
        self._scale = lora_scale(config)

    def read_full(self, parameter: str) -> Tensor:
        """Return the full logical tensor, merged."""
        weight = self._checkpoint.read_full(parameter)
        thin, other = (f"{parameter.removesuffix('.weight')}.adapter.lora_{part}.weight" for part in "AB")
        if thin not in self._checkpoint.parameters:
            return weight
        return merged(weight, self._checkpoint.read_full(thin), self._checkpoint.read_full(other), self._scale)


def without_adapters(checkpoint: Checkpoint, config: ModelConfig) -> tuple[FullWeights, ModelConfig]:
    """Return the weights and the configuration of a model without adapters that computes the same."""
    if not config.lora_rank:
        return checkpoint, config
    return MergedCheckpoint(checkpoint, config), replace(config, lora_rank=0)
