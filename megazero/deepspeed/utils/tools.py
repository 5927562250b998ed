"""Functions of `deepspeed.utils` that megazero's library has under no name of its own."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from megazero.library.state.access import safe_get_full_grad, safe_set_full_grad

logger = logging.getLogger("megazero.deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on these ranks; on every rank if there are none, or -1 is among them."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return the item with copies of the tensors in it, each with memory of its own, which torch.save writes whole."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to(device, copy=True), item)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Set the gradient of each parameter to update_func(gradient, parameter), whole ones; a collective call.

    Parameters without a gradient are left out.
    """
    for parameter in param_list:
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            safe_set_full_grad(parameter, update_func(gradient, parameter))
