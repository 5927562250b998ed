"""Compiles functions by torch's compiler; of the processes of a node that need the same graph, one compiles it first.

The ranks of a node compile the same code at the same time, and all wait for cores that the others take.  Here the first
one that comes to a graph compiles it, and the others wait until it is done: they find the kernels that the compiler
keeps on the disk, and the whole graph where their device has the same number (on CPUs, and where every process sees one
GPU alone).  A process that compiles a graph waits for no other one, so this can't deadlock, whatever graphs the stages
of a pipeline have; a lock ends with its process, and a process that fails leaves the graph to the next.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

import torch

from megazero.operating_system import lock_file, unlock_file
from megazero.tensor_parallel.decompositions import DECOMPOSITIONS, decompositions

# The search of torch's mode "max-autotune-no-cudagraphs": CUDA graphs keep addresses, and ZeRO moves parameters.  Of
# matrix products torch's library and Triton's kernels are timed; torch's C++ kernels are for CPUs.
SEARCH: Mapping[str, Any] = MappingProxyType(
    {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,TRITON", "coordinate_descent_tuning": True}
)


def compiled(function: Callable[..., Any], *, searches: bool = False, has_one_shape: bool = True) -> Callable[..., Any]:
    """Compile the function as one graph (a graph break is an error) for one shape, since training has no other.

    searches: times several kernels for every piece on the GPU and takes the fastest.
    has_one_shape: False for a function that is called with runs of all lengths, which have one graph together.
    """
    options = dict(SEARCH) if searches else None
    return torch.compile(function, fullgraph=True, dynamic=not has_one_shape, backend=_inductor, options=options)


def _inductor(graph: torch.fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any] | None = None) -> Any:
    from torch._inductor.compile_fx import compile_fx  # takes a second to import, where nothing is compiled too

    # The compiler's cache on the disk does not look at decompositions: what was made with torch's own has another tag.
    settings: Any = torch.compiler.config
    with settings.patch(cache_key_tag=f"{settings.cache_key_tag} {DECOMPOSITIONS}"):
        return compile_fx(
            graph,
            list(inputs),
            inner_compile=_compile_in_turn,
            config_patches=options,
            decompositions=decompositions(),
        )


def _compile_in_turn(graph: torch.fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
    """Compile one graph, forward's or backward's, after another process of this node that does so now."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    shapes = [(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else str(value) for value in inputs]
    name = hashlib.sha256(f"{graph.code} {shapes}".encode()).hexdigest()
    with one_at_first(os.path.join(cache_dir(), "megazero", name)):
        return compile_fx_inner(graph, inputs, **settings)


@contextmanager
def one_at_first(path: str) -> Iterator[None]:
    """Enter the block alone, or after the process that is in it has left it, and then with all that have waited for it.

    path: the file whose lock that process holds.  Where files can't be locked, all enter at once.
    """
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
    except OSError:
        yield
        return
    try:
        try:
            if not lock_file(descriptor, wait=False):
                lock_file(descriptor, wait=True, shared=True)
        except OSError:
            pass  # of a file system without locks
        yield
    finally:
        with suppress(OSError):
            unlock_file(descriptor)  # processes that the compiler has forked have the descriptor too
        os.close(descriptor)
