"""The layer of DeepSpeed's mixtures of experts, which is not there; programs import it though they may not use it."""

from typing import Any

from torch import nn

from megazero.deepspeed.missing import refuse

REASON = "there are no experts here: groups of ranks with parameters of their own"
LEGAL = "a mixture of the model's own, marked by deepspeed.utils.set_z3_leaf_modules in stage 3"


class MoE(nn.Module):
    """A layer that raises UsageError when it is made."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        raise refuse("deepspeed.moe.layer.MoE", REASON, LEGAL)
