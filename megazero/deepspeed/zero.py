"""DeepSpeed's `deepspeed.zero`: the names by which its users reach megazero's ZeRO around a model.

`Init`, `GatheredParameters`, `register_external_parameter` and `TiledLinear` are the library's own.  A partitioned
parameter has DeepSpeed's `ds_id`, `ds_status`, `ds_numel` and `ds_shape`; one that is whole now has none of them.  What
offloads or quantizes, and `MiCS_Init`, is not there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, IntEnum, StrEnum
from typing import Any

from torch import nn

from megazero.config.engine_sections import PrecisionConfig, ZeroConfig
from megazero.deepspeed.missing import missing_name
from megazero.errors import Problem, UsageError
from megazero.library.module.tiled_linear import TiledLinear
from megazero.library.module.units import choose_units
from megazero.library.partitioned_init.init import Init
from megazero.parallel.param_spec import named_specs
from megazero.units import format_bytes
from megazero.zero.parameters.gathered import GatheredParameters, register_external_parameter
from megazero.zero.parameters.guard import ParamStatus as ZeroParamStatus
from megazero.zero.plan import model_state_bytes, resolve

__all__ = [
    "DeepSpeedTensorOverride",
    "GatheredParameters",
    "Init",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "TiledLinear",
    "ZeroParamStatus",
    "ZeroStageEnum",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]

# transformers replaces this function of DeepSpeed's while a model is made, so that Init leaves the format of
# torch.arange alone.  The library's Init replaces no function of torch's, so that this one is never called.
zero_wrapper_for_fp_tensor_constructor: Any = None


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise missing_name(name, __name__)


class DeepSpeedTensorOverride(Enum):
    """The changes of `Init` to the tensors of the modules made in its block."""

    dtype = 1
    device = 2


class ZeroStageEnum(IntEnum):
    """DeepSpeed's words for ZeRO stages, as `runtime.zero.config` has them."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class OffloadDeviceEnum(StrEnum):
    """The places of model states that are not the device, as `runtime.zero.offload_config` has them."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """The kinds of state that `engine.offload_states` moves, as `runtime.zero.offload_config` has them."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Raise UsageError: the engine gathers a registered parameter with the module for good."""
    given = f"unregister_external_parameter({type(module).__name__}, a parameter of shape {tuple(parameter.shape)})"
    rule = "a parameter stays with the modules that it is registered with, at the cost of its gathers only"
    raise UsageError(Problem(given, rule, "an engine that is made anew"))


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Return a context in which an engine's parameters are whole, so that generation gathers none of them again."""
    with GatheredParameters(model.parameters()):
        yield model


# --- estimates --------------------------------------------------------------------------------------------------------


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the model states of stage 2 on each GPU, for a model; the last argument is for DeepSpeed's host memory."""
    total, _ = _sizes_of(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the model states of stage 2 on each GPU, for a number of parameters."""
    _print_estimate(2, total_params, 0, num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the model states of stage 3 on each GPU, for a model; the last argument is for DeepSpeed's host memory."""
    total, largest = _sizes_of(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the model states of stage 3 on each GPU, for numbers of parameters."""
    _print_estimate(3, total_params, largest_layer_params, num_gpus_per_node, num_nodes)


def _print_estimate(stage: int, total: int, largest: int, gpus: int, nodes: int) -> None:
    """Print a line for each number format.  largest: most parameters of a unit (`library/module/units.py`)."""
    model = f"{total} parameters" + (f", at most {largest} of them gathered for use" if stage == 3 else "")
    print(f"ZeRO stage {stage} with AdamW: model states on each of {nodes} x {gpus} GPUs for {model}")
    for precision in ("bf16", "fp16", "fp32"):
        plan = resolve(ZeroConfig(zero_stage=stage), PrecisionConfig(precision=precision))
        states = model_state_bytes(plan, total, nodes * gpus)
        gathered = largest * plan.parameter.itemsize
        parts = f"parameters {format_bytes(states.parameters)}, gradients {format_bytes(states.gradients)}"
        parts += f", master weights {format_bytes(states.master)}, moments {format_bytes(states.moments)}"
        parts += f", gathered parameters {format_bytes(gathered)}" if stage == 3 else ""
        print(f"  {precision}  {format_bytes(states.total + gathered)}: {parts}")


def _sizes_of(model: nn.Module) -> tuple[int, int]:
    """Return the number of a model's parameters, and that of its largest unit."""
    numel = {spec.name: spec.numel for spec, _ in named_specs(model)}
    units = [sum(numel[name] for name in unit.parameters) for unit in choose_units(model)]
    return sum(numel.values()), max(units, default=0)
