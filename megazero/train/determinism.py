"""Makes a run on GPUs compute the same bits every time it is run in the same layout on the same machines.

Without it some kernels add in whatever order their threads come: the backward of attention, and sums by index.  With it
torch takes kernels that add in a fixed order, or raises an error where it has none, and nothing is chosen by its speed,
which differs from run to run: neither the kernel of attention nor, in compiled code, the tiles of a sum.  The libraries
have settings of their own, in the environment, which are read when they start: cuBLAS must have workspaces of a fixed
size, and NCCL must not add inside the switch (NVLS).  On CPUs a run is bitwise repeatable in any case.
"""

import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch

from megazero.config.run import RunConfig
from megazero.errors import ConfigError, Problem

# {variable: values that keep a run deterministic}, of which the first is set where the user has set none.
ENVIRONMENT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
        "NCCL_ALGO": ("^NVLS", "Ring", "Tree", "CollnetDirect", "CollnetChain"),
    }
)


def use_deterministic_mode(config: RunConfig, device: torch.device) -> Iterator[str]:
    """Make this process deterministic if the run is to be, and yield a line on its price.

    Comes before the first matrix product and the first collective on the GPU.
    Raises ConfigError for a variable of the environment that forbids it.
    """
    if not config.training.deterministic_mode:
        return
    if device.type != "cuda":
        if config.parallel.device == "auto":  # with "cpu" the command line has had this notice
            yield "--deterministic-mode: moot here, because on CPUs every run is bitwise repeatable"
        return
    os.environ.update(environment(os.environ))
    torch.use_deterministic_algorithms(True)
    # Every element is written before it is read, so filling new tensors would only cost time.
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    yield (
        "--deterministic-mode: resuming is bitwise; attention's backward adds in a fixed order and is never cuDNN's,"
        " sums by index sort first, NCCL adds outside the switch (no NVLS), and no kernel is chosen by its speed: all"
        " of these are slower"
    )


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set in the environment `given`; raise ConfigError for one that forbids determinism."""
    for name, allowed in ENVIRONMENT.items():
        if given.get(name, allowed[0]) not in allowed:
            rule = f"--deterministic-mode needs {name} to be one of {', '.join(allowed)}"
            raise ConfigError(Problem(f"{name}={given[name]}", rule, f"{name}={allowed[0]}, or leave it unset"))
    return {name: allowed[0] for name, allowed in ENVIRONMENT.items() if name not in given}
