"""DeepSpeed's `deepspeed.checkpointing`: activation checkpoints of a user's model, kept as `configure` sets it.

`checkpoint` is `megazero.recompute`.  Its settings are those of the engine whose forward runs, unless the program calls
`configure`, whose settings hold in its thread from then on, in every engine's forward and outside.  The random states
that are restored are those of torch's default generators; a tracker of further ones is Megatron-LM's, or the model's.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megazero.activations.assemble import RankParts, recomputation
from megazero.activations.context import configure_recomputation, configured_recomputation, recompute
from megazero.comm.interface import Communicator
from megazero.comm.local import LocalCommunicator
from megazero.dialects.deepspeed.reading import read_file
from megazero.errors import Problem, UsageError
from megazero.generators import DefaultGenerators
from megazero.library.adopted.group import adopt_group, own_device
from megazero.library.adopted.mesh import find_groups
from megazero.library.config import load_engine_config
from megazero.memory.ledger_interface import NullLedger
from megazero.timers import Timers

__all__ = [
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "reset",
]

_SECTION = "activation_checkpointing"


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call function(*args, **kwargs); its activations are computed again in backward instead of being retained."""
    return recompute(function, *args, **kwargs)


def configure(
    mpu_: Any = None,
    deepspeed_config: Mapping[str, Any] | str | Path | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how activation checkpoints are kept; the arguments replace what the configuration's section sets.

    mpu_: an object like Megatron-LM's mpu, over whose tensor-parallel processes activations are partitioned.
    Raises ConfigError for settings that are illegal or contradict each other, and UsageError for `profile`.
    """
    if profile:
        given, rule = (
            "configure(profile=True)",
            "the seconds are counted by an engine, which take_checkpoint_seconds gives",
        )
        raise UsageError(Problem(given, rule, f"{_SECTION}: {{profile: true}} in the engine's configuration"))
    given_here = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
    }
    section = _section_of(deepspeed_config) | {name: value for name, value in given_here.items() if value is not None}
    config = load_engine_config({_SECTION: section}).activations
    device = own_device()
    rank = RankParts(_tensor_parallel(mpu_), device, DefaultGenerators(device), NullLedger(), Timers(device))
    configure_recomputation(recomputation(config, rank, number=None))


def is_configured() -> bool:
    """Return True once this thread has called `configure`."""
    return configured_recomputation() is not None


def reset() -> None:
    """Forget the checkpoints of forwards that no backward has followed; an engine's forward does that itself."""
    if (settings := configured_recomputation()) is not None:
        settings.checkpoints.begin_pass()


def get_cuda_rng_tracker() -> Any:
    """Raise UsageError: megazero holds no random states for a user's tensor-parallel layers."""
    raise _no_tracker("get_cuda_rng_tracker()")


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Raise UsageError: megazero holds no random states for a user's tensor-parallel layers."""
    raise _no_tracker(f"model_parallel_cuda_manual_seed({seed})")


def _no_tracker(given: str) -> UsageError:
    rule = "recomputation restores the states of torch's default generators, and of no others"
    return UsageError(Problem(given, rule, "torch.manual_seed; Megatron-LM's own tracker for its own layers"))


def _section_of(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """Return the configuration's section about activation checkpoints, in DeepSpeed's words, unchecked."""
    if config is None:
        return {}
    content = config if isinstance(config, Mapping) else read_file(Path(config))
    return dict(content.get(_SECTION) or {})


def _tensor_parallel(mpu: Any) -> Communicator:
    group = None if mpu is None else find_groups(mpu).tensor
    return LocalCommunicator() if group is None else adopt_group(group)
