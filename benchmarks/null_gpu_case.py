"""Takes the training steps of one case of `null_gpu.py` in a process of its own, and writes their figures as JSON.

    build/null_gpu/python benchmarks/null_gpu_case.py '{"world_size": 1, "words": [...]}' FOUND.json

The process is the last rank of a job of `world_size`, whose other ranks are torch's fake process group: its collectives
return at once and move nothing.  On a CPU build of torch the steps are taken on the CPU, and the figures of a GPU are
left out.
"""

import ctypes
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from gpu_phases import synchronizations
from jobs import Place
from steps import LR, Steps, configuration_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazero.config.derived import vocab_rows
from megazero.config.run import RunConfig
from megazero.parallel.launch import Launch
from megazero.train.step import StepControls, training_step

WARM_STEPS = 3
# cuDNN's kernels can't be chosen on the null GPU.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


class Recorder:
    """The log of the null GPU's libraries, by which calls of the CUDA runtime are counted."""

    def __init__(self) -> None:
        self._log = getattr(ctypes.CDLL(None), "null_gpu_log", None)

    @property
    def is_there(self) -> bool:
        return self._log is not None

    def calls(self, function: Callable[[], object]) -> list[list[str]]:
        """Return the calls that a function makes: kind, name and detail of each."""
        assert self._log is not None, "this process doesn't run on the null GPU"
        with tempfile.NamedTemporaryFile() as file:
            self._log(file.name.encode())
            try:
                function()
            finally:
                self._log(None)
            return [line.split("|") for line in Path(file.name).read_text(encoding="utf-8").splitlines()]


class EagerBytes(TorchDispatchMode):
    """Counts the bytes that operations within compiled code read and write beside Inductor's own kernels.

    An operator of this project counts as one pass: each of its tensors is read or written once.  Views, new memory,
    matrix products and attention, which is bound by arithmetic, do not count.
    """

    _FREE = (
        "empty",
        "mm",
        "scaled_dot_product",
        "scaled_mm",
        "attention_forward",
        "attention_backward",
        "_unsafe_view",
    )

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view and not any(word in func._schema.name for word in self._FREE):
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
            self.by_name[func._schema.name] += sum(tensor.nbytes for tensor in tensors)
        return result


class CompiledBlocks:
    """The bytes of memory-bound kernels in the graphs that Inductor makes of a transformer block's code.

    graphs: by kernel, those of each graph, as the scheduler counts them: every buffer once that a kernel reads or
    writes.
    """

    def __init__(self) -> None:
        self.graphs: list[dict[str, int]] = []
        self._ids: set[int | None] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        from torch._inductor.graph import GraphLowering
        from torch._inductor.scheduler import ExternKernelSchedulerNode

        original = GraphLowering.compile_to_module

        def compile_to_module(graph: Any) -> Any:
            module = original(graph)
            traces = [node.meta.get("stack_trace") or "" for node in graph.orig_gm.graph.nodes]
            if any("megazero/model/" in trace for trace in traces):
                nodes = [node for node in graph.scheduler.nodes if not isinstance(node, ExternKernelSchedulerNode)]
                self._ids.add(graph.graph_id)
                self.graphs.append({node.get_name(): node.get_read_write_buffers_sizes() for node in nodes})
            return module

        with patch.object(GraphLowering, "compile_to_module", compile_to_module):
            yield

    def eager_bytes(self, step: Callable[[], object], num_blocks: int) -> dict[str, int]:
        """Return the bytes, by operation, that a block's compiled code moves by operations that are not Inductor's."""
        from torch._inductor.output_code import CompiledFxGraph

        original, counted = CompiledFxGraph.__call__, EagerBytes()

        def call(graph: Any, inputs: Any) -> Any:
            with counted if graph.fx_kwargs.get("graph_id") in self._ids else nullcontext():
                return original(graph, inputs)

        with patch.object(CompiledFxGraph, "__call__", call):
            step()
        return {name: nbytes // num_blocks for name, nbytes in counted.by_name.items()}


def measure(config: RunConfig, world_size: int, device: torch.device) -> dict[str, Any]:
    """Take steps of the last rank, and return the figures of one after the first few."""
    recorder, blocks = Recorder(), CompiledBlocks()
    if world_size > 1:
        dist.init_process_group("fake", rank=world_size - 1, world_size=world_size, store=FakeStore())
    steps = Steps(config, Place(Launch(world_size - 1, world_size, 0), device, lambda: None))
    batch, controls = steps.batch(0), StepControls(LR, 1.0)

    def step() -> None:
        training_step(steps.parts, batch, controls)

    is_compiled = bool(steps.core.compiled)
    with blocks.watched() if is_compiled else nullcontext():
        for _ in range(WARM_STEPS):
            step()
    found: dict[str, Any] = {"compiled": steps.core.compiled}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        calls = recorder.calls(step)
        kinds = Counter(kind for kind, *_ in calls)
        found |= {
            "launches": sum(kinds[kind] for kind in ("KERNEL", "PRODUCT", "COPY", "MEMSET", "GRAPH")),
            "products": kinds["PRODUCT"],
            "copies": kinds["COPY"] + kinds["MEMSET"],
            "graphs": [int(detail) for kind, _, detail in calls if kind == "GRAPH"],
            "allocations": kinds["ALLOC"],
            "synchronizations": kinds["SYNC"],
            "waits": synchronizations(step),
            "peak_bytes": torch.cuda.max_memory_allocated() + unallocated_bytes_of_graphs(),
            "kernels": Counter(name for kind, name, _ in calls if kind in ("KERNEL", "PRODUCT")).most_common(60),
        }
        if blocks.graphs and not config.training.enable_cuda_graph:  # a graph's launch runs no code to be watched
            model = config.model
            eager = blocks.eager_bytes(step, model.num_layers)
            tokens = config.training.micro_batch_size * model.seq_length
            found["unit_bytes"] = tokens * model.hidden_size * 2
            found["model"] = {
                "tokens": tokens,
                "layers": model.num_layers,
                "width": model.hidden_size,
                "length": model.seq_length,
                "vocabulary": vocab_rows(config, steps.core.model.vocab_size),
                "parameters": sum(parameter.numel() for parameter in steps.core.model.parameters()),
            }
            found["block_bytes"] = sum(sum(graph.values()) for graph in blocks.graphs) + sum(eager.values())
            found |= {"block_graphs": blocks.graphs, "block_eager": eager}
    steps.close()
    if world_size > 1:
        dist.destroy_process_group()
    return found


def unallocated_bytes_of_graphs() -> int:
    """Return the bytes that CUDA graphs use and the allocator counts as free: it leaves them to the next recording."""
    segments = [segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in segments)


def main(words: Sequence[str]) -> int:
    case, output = json.loads(words[0]), Path(words[1])
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda" and not Recorder().is_there:
        raise SystemExit("null_gpu_case.py: torch sees a real GPU; run it by build/null_gpu/python")
    config = configuration_of(case["words"], case["world_size"])
    with warnings.catch_warnings(), sdpa_kernel(_ATTENTION) if device.type == "cuda" else nullcontext():
        found = measure(config, case["world_size"], device)
    output.write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
