"""Functions around DeepSpeed's mixtures of experts, which are not there; programs import them without using them."""

from typing import Any

from megazero.deepspeed.missing import refuse
from megazero.deepspeed.moe.layer import LEGAL, REASON


def split_params_into_different_moe_groups_for_optimizer(*_arguments: Any, **_options: Any) -> Any:
    """Raise UsageError: there are no experts."""
    raise refuse("split_params_into_different_moe_groups_for_optimizer", REASON, LEGAL)


def has_moe_layers(_module: Any) -> tuple[bool, int]:
    """Return that a module has no layer of experts, and their number."""
    return False, 0
