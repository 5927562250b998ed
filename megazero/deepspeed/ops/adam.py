"""DeepSpeed's names of Adam: torch's optimizers, which the engine updates on flat pieces as any other."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from megazero.deepspeed.missing import refuse


def FusedAdam(
    params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> Optimizer:
    """Return torch's AdamW, or Adam where `adam_w_mode` is False.  set_grad_none: a step frees gradients either way."""
    if not bias_correction:
        raise refuse("FusedAdam(bias_correction=False)", "torch's Adam corrects its moments", "bias_correction=True")
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


def DeepSpeedCPUAdam(
    model_params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> Optimizer:
    """Return `FusedAdam` of these options; the engine's configuration (offload_optimizer) sets where states live."""
    if not fp32_optimizer_states:
        rule = "optimizer states have the format of master weights"
        raise refuse("DeepSpeedCPUAdam(fp32_optimizer_states=False)", rule, "fp32_optimizer_states=True")
    return FusedAdam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
