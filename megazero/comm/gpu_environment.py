"""The defaults of CUDA's, NCCL's and the compiler's environment variables, all in one place.

They are set before CUDA starts (`startup.choose_device`), and never over a variable that the user has set.
"""

from collections.abc import Mapping
from types import MappingProxyType

from megazero.errors import ConfigError, Problem

# By default CUDA has 8 hardware queues, and a pipeline stage has a dozen streams: a receive that is posted ahead would
# hold up a send in the same queue, for which its peer waits.  Megatron-LM's programs are started with 1, so that a
# collective is scheduled before the product beside it; that is a matter of speed, and a user's 1 stands.
_QUEUES = MappingProxyType({"CUDA_DEVICE_MAX_CONNECTIONS": "32"})

# Activations and gradients have channels of their own on purpose, so messages outside of a batch are no fault.  C++
# stacks of ranks that end because another one has failed would bury its message.
_NCCL = MappingProxyType(
    {
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
        "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
    }
)

# Buffers of units of different size come and go; segments that grow leave no gaps of the wrong size between them.
_ALLOCATOR = MappingProxyType({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
_ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

# {variable: values that keep a run deterministic}, of which the first is set where the user has set none.
DETERMINISTIC: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
        "NCCL_ALGO": ("^NVLS", "Ring", "Tree", "CollnetDirect", "CollnetChain"),
    }
)

_MOST_COMPILING = 32  # torch's own limit


def missing_defaults(environment: Mapping[str, str], cores: int) -> dict[str, str]:
    """Return the variables to set for a process that uses a GPU; what the user has set is not among them.

    cores: this process's share of its node's; torch would have every process compile on all of them.
    """
    defaults = {**_QUEUES, **_NCCL, "TORCHINDUCTOR_COMPILE_THREADS": str(min(cores, _MOST_COMPILING))}
    if not any(name in environment for name in _ALLOCATOR_NAMES):
        defaults |= _ALLOCATOR
    return {name: value for name, value in defaults.items() if name not in environment}


def defaults_line(defaults: Mapping[str, str]) -> str:
    """Return the line for the user on which variables have been set."""
    return " ".join(["environment:", *(f"{name}={value}" for name, value in defaults.items())])


def deterministic_variables(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set in the environment `given`; raise ConfigError for one that forbids determinism."""
    for name, allowed in DETERMINISTIC.items():
        if given.get(name, allowed[0]) not in allowed:
            rule = f"--deterministic-mode needs {name} to be one of {', '.join(allowed)}"
            raise ConfigError(Problem(f"{name}={given[name]}", rule, f"{name}={allowed[0]}, or leave it unset"))
    return {name: allowed[0] for name, allowed in DETERMINISTIC.items() if name not in given}
