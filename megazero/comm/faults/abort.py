"""Aborts the communicators of a rank whose job has failed.

NCCL's collectives are kernels that wait on the GPU for the other ranks, and nothing that the host waits for raises an
error when a rank has gone.  To destroy a communicator is to wait for its kernels; to abort it ends them.  An abort also
breaks the connections to the other ranks, whose own NCCL may then end their processes with traces of its own; so it
comes after the job's message, and after the other ranks can have read that the job has failed.
"""

import threading
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group, _world


def uses_nccl() -> bool:
    """Return True if a process group in torch's list communicates by NCCL, alone or beside gloo."""
    return any("nccl" in configuration for configuration in _world.pg_backend_config.values())


def abort_groups(limit_seconds: float) -> bool:
    """Abort all process groups in torch's list; return True if that has ended within the limit.

    Afterwards torch has no process groups, so there is none left to destroy.  The calls are made by a thread of their
    own: the driver of a broken GPU may never answer them.
    """
    thread = threading.Thread(target=_abort, name="megazero abort", daemon=True)
    thread.start()
    thread.join(limit_seconds)
    return not thread.is_alive()


def _abort() -> None:
    if dist.is_initialized():
        with suppress(Exception):  # of a communicator that has failed; the process ends all the same
            _abort_process_group()
