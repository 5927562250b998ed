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
        1, help="pipeline stages: processes that have consecutive layers each", unit="processes", ge=1
    )
    num_layers_per_virtual_pipeline_stage: int | None = setting(
        None,
        help="layers of a chunk, on average, which gives a pipeline stage several chunks, taken in turns (the"
        " interleaved schedule); without it, one chunk a pipeline stage",
        unit="layers",
        ge=1,
    )
    pipeline_schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "zero-bubble"] = setting(
        "auto",
        help="order of forwards and backwards; auto is interleaved where a pipeline stage has several chunks, else"
        " 1f1b",
    )
    pipeline_split: str | None = setting(
        None,
        help="layers of every chunk, in the order of the model, such as 5,6,5,2; without it, as evenly as the"
        " embedding's and the vocabulary head's own costs allow",
    )
    sequence_parallel: bool = setting(
        False,
        help="split what lies between tensor-parallel regions over the processes of the group, by tokens: norms,"
        " dropout, residuals and checkpoints",
    )
    rank_order: Literal["pp-dp-tp", "dp-pp-tp", "pp-tp-dp", "tp-pp-dp", "dp-tp-pp", "tp-dp-pp"] = setting(
        "pp-dp-tp",
        help="how ranks are dealt out to pipeline stages, data-parallel copies and tensor-parallel slices: ranks along"
        " the axis named last are neighbours",
    )
    allow_tensor_parallel_across_nodes: bool = setting(
        False, help="let a tensor-parallel group lie on several nodes, over the slower links between them"
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
    cpu_threads: int | None = setting(
        None,
        help="threads that a process computes with on the CPU; without it, what OMP_NUM_THREADS says (torchrun's own 1"
        " for several processes doesn't count), else cores of the node / processes on it, at least 1; a process alone"
        " on its node: as torch chooses",
        unit="threads",
        ge=1,
    )
