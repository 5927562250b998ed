"""torch's default random generators, which plain code such as dropout draws from."""

import torch
from torch import Tensor


def default_generator(device: torch.device) -> torch.Generator:
    """Return the default generator of the CPU or of one GPU."""
    if device.type == "cuda":
        current = torch.cuda.current_device()  # initialises CUDA, before which there are no generators
        return torch.cuda.default_generators[current if device.index is None else device.index]
    return torch.default_generator


class DefaultGenerators:
    """The states of the CPU's generator and, where `device` is a GPU, that GPU's."""

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda" and torch.cuda.is_available():
            self._generators.append(default_generator(device))

    def get_state(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def set_state(self, state: list[Tensor]) -> None:
        for generator, one in zip(self._generators, state, strict=True):
            generator.set_state(one)
