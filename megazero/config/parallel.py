"""How the processes share the work, and over what they talk."""

from typing import Literal

from pydantic.dataclasses import dataclass

from megazero.config.fields import STRICT, setting


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ParallelConfig:
    """Degrees of parallelism; the data-parallel degree is what is left of the world size."""

    tensor_model_parallel_size: int = setting(
        1, help="processes that share every layer", unit="processes", aliases=("model-parallel-size",), ge=1
    )
    pipeline_model_parallel_size: int = setting(
        1,
        help="groups of consecutive layers on different processes; only 1 so far",
        unit="processes",
        beyond="pipeline parallelism is not there yet",
        ge=1,
        le=1,
    )
    distributed_backend: Literal["auto", "nccl", "gloo"] = setting(
        "auto", help="what carries the collectives; auto is nccl on GPUs, gloo on CPUs"
    )
    distributed_timeout_minutes: float = setting(
        10.0, help="a collective that waits longer than this ends the run", unit="minutes", gt=0
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", help="where tensors live; auto is one GPU a process if the machine has GPUs, else the CPU"
    )
