"""Makes a run on GPUs compute the same bits every time it is run in the same layout on the same machines.

Without it some kernels add in whatever order their threads come: the backward of attention, and sums by index.  With it
torch takes kernels that add in a fixed order, or raises an error where it has none, and nothing is chosen by its speed,
which differs from run to run: neither the kernel of attention nor, in compiled code, the tiles of a sum.  The libraries
have settings of their own, in the environment, which are read when they start: cuBLAS must have workspaces of a fixed
size, and NCCL must not add inside the switch (NVLS).  On CPUs a run is bitwise repeatable in any case.
"""

import os
from collections.abc import Iterator

import torch

from megazero.comm.gpu_environment import deterministic_variables
from megazero.config.run import RunConfig


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
    os.environ.update(deterministic_variables(os.environ))
    torch.use_deterministic_algorithms(True)
    # Every element is written before it is read, so filling new tensors would only cost time.
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    yield (
        "--deterministic-mode: resuming is bitwise; attention's backward adds in a fixed order and is never cuDNN's,"
        " sums by index sort first, NCCL adds outside the switch (no NVLS), and no kernel is chosen by its speed: all"
        " of these are slower"
    )
