"""The random states of ordinary code: torch's default generators."""

import torch
from torch import Tensor


class DefaultGenerators:
    """The CPU's generator and, where `device` is a GPU, that GPU's."""

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda" and torch.cuda.is_available():
            torch.cuda.init()  # type: ignore[no-untyped-call]
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])

    def get_state(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def set_state(self, state: list[Tensor]) -> None:
        for generator, one in zip(self._generators, state, strict=True):
            generator.set_state(one)
