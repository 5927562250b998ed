"""DeepSpeed's `deepspeed.utils.zero_to_fp32`: the weights of a checkpoint as one state_dict, without an engine.

A checkpoint stores a tensor that has several names under the first of them.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from megazero.checkpoint.reader import open_checkpoint
from megazero.errors import Problem, UsageError
from megazero.library.state.checkpoints import choose_folder

__all__ = ["get_fp32_state_dict_from_zero_checkpoint", "load_state_dict_from_zero_checkpoint"]

_STATE = ("weight", "buffer")


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | int | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, floating-point ones in float32, in host memory.

    tag: the checkpoint's; None for the newest one.  lazy_mode: accepted; the tensors are read at once in any case.
    Raises CheckpointError for what is missing or damaged, and UsageError for exclude_frozen_parameters.
    """
    if exclude_frozen_parameters:
        rule = "a checkpoint does not record which parameters were frozen"
        legal = "exclude_frozen_parameters=False, and the names that are wanted"
        raise UsageError(Problem("exclude_frozen_parameters=True", rule, legal))
    checkpoint = open_checkpoint(choose_folder(Path(checkpoint_dir), None if tag is None else str(tag)))
    state = {
        name: checkpoint.read_full(name, kind)
        for name, saved in checkpoint.parameters.items()
        for kind in _STATE
        if kind in saved.kinds
    }
    return {name: value.float() if value.is_floating_point() else value for name, value in state.items()}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | int | None = None
) -> nn.Module:
    """Load the weights of a checkpoint into a model without an engine, and return it on the CPU.

    Raises as torch's load_state_dict does, except for further names of a tensor.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    first: dict[Tensor, str] = {}
    for name, tensor in model.cpu().state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and first.setdefault(tensor, name) in state:
            state.setdefault(name, state[first[tensor]])
    with torch.no_grad():
        model.load_state_dict(state)
    return model
