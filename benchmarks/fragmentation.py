"""Measures what defragmentation (MD; ZeRO, section 6.3) saves, on the allocations of a real training step.

    python benchmarks/fragmentation.py [--num-layers 8] [--hidden-size 256] [--micro-batch-size 4] [--no-recompute]

Every storage that one step of a small GPT makes is recorded, from birth to death: forward with recomputed layers,
backward, clipping, AdamW.  Parameters and moments exist before the step and are left out.  Storages that *live long*
are those that forward leaves for backward, and the parameters' gradients.  The record is then replayed

    plain        in one memory, first fit
    one arena    with all storages that live long in one arena
    two arenas   with those left for backward in one arena and gradients in another, as the engine keeps them

where a storage that lives long is made among the rest, and copied to its arena before the next one is made.  Printed
is the smallest memory in which each replay succeeds, beside the most bytes alive at once, which no replay can go below.
First fit places a request in the same way however much memory follows, so the smallest memory is the highest address
in use; with arenas, the sum of these addresses in the arenas and in the rest.

Arenas are expected to have no holes, but memory that one of them does not need at the moment is of no use elsewhere,
and copies cost a second storage for a moment.  A single step on an empty memory fragments little, and there arenas may
well cost more than they save.

On a GPU the engine's steps (ZeRO stage 2 on one device, gradients copied into arenas as they come) are measured too,
with contiguous gradients and without, under PyTorch's allocator as it is and with expandable segments: bytes reserved
beyond those allocated, and the largest micro-batch that fits `--gpu-gib`.  That part has never run on a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from small_gpt import LR, SETTINGS, VOCABULARY, add_work, make_model, model_config
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from megazero.comm.startup import make_mesh
from megazero.config.engine_sections import PrecisionConfig, ZeroConfig
from megazero.memory.address_book import AddressBook, Block
from megazero.memory.fused_buffers import FusedBuffers
from megazero.model.gpt import GPT
from megazero.optim.inner import FusedAdamW, StepInputs
from megazero.parallel.topology import Topology
from megazero.units import format_bytes
from megazero.zero.engine import Engine, EngineSettings
from megazero.zero.plan import resolve

UNBOUNDED = 1 << 50
ALLOCATORS = {"as it is": "", "expandable segments": "expandable_segments:True"}


class Change(NamedTuple):
    """The birth of storage `number` with `nbytes` bytes, or its death if `nbytes` is 0."""

    number: int
    nbytes: int


class Recorder(TorchDispatchMode):
    """A dispatch mode that records births and deaths of storages, except those of the tensors `there` before."""

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()
        self._there = {tensor.untyped_storage()._cdata for tensor in there}
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._births = 0
        self.changes: list[Change] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._meet(tensor.untyped_storage())
        return result

    def numbers(self, tensors: Iterable[Tensor] | None = None) -> set[int]:
        """Return the numbers of the storages of these tensors, or of all that are alive."""
        keys = self._alive if tensors is None else [tensor.untyped_storage()._cdata for tensor in tensors]
        return {self._alive[key][0] for key in keys}

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._there and key not in self._alive and storage.nbytes():
            self._alive[key] = self._births, weakref.ref(storage, lambda _: self._died(key))
            self.changes.append(Change(self._births, storage.nbytes()))
            self._births += 1

    def _died(self, key: int) -> None:
        number, _ = self._alive.pop(key)
        self.changes.append(Change(number, 0))


class Trace(NamedTuple):
    """The changes of a step, and the numbers of the storages that live long, by the arena that takes them."""

    changes: list[Change]
    long_lived: dict[str, set[int]]


def record_step(model: GPT, samples: Tensor) -> Trace:
    """Record the second step of training, before which the first one has made the moments."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=SETTINGS.weight_decay, fused=True)
    traces = []
    for _ in range(2):
        states = [state for states in optimizer.state.values() for state in states.values()]
        with Recorder([*parameters, *model.buffers(), *states, samples]) as recorder:
            loss = model.summed_loss(samples[:, :-1], samples[:, 1:]) / samples.numel()
            left = recorder.numbers()
            loss.backward()
            gradients = recorder.numbers(p.grad for p in parameters if p.grad is not None)
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            del loss
        traces.append(Trace(recorder.changes, {"left for backward": left, "gradients": gradients}))
    return traces[-1]


class Memory:
    """A memory without a limit, filled by first fit, that keeps the highest address that was ever in use."""

    def __init__(self) -> None:
        self._book = AddressBook(UNBOUNDED, compacts=False)
        self._blocks: dict[int, Block] = {}
        self.highest = 0

    @property
    def most_live(self) -> int:
        return self._book.statistics.high_water_bytes

    def put(self, number: int, nbytes: int) -> None:
        grant = self._book.allocate(nbytes)
        assert grant is not None
        self._blocks[number] = grant.block
        self.highest = max(self.highest, grant.block.stop)

    def drop(self, number: int) -> None:
        if number in self._blocks:
            self._book.free(self._blocks.pop(number))


def replay(trace: Trace, arenas: dict[str, Memory], rest: Memory) -> None:
    """Replay the changes of a trace in these memories; without arenas everything is in `rest`."""
    arena_of = {number: arenas[name] for name in arenas for number in trace.long_lived[name]}
    just_copied: int | None = None
    for number, nbytes in trace.changes:
        if just_copied is not None:
            rest.drop(just_copied)
            just_copied = None
        if not nbytes:
            arena_of.get(number, rest).drop(number)
            continue
        rest.put(number, nbytes)
        if number in arena_of:
            arena_of[number].put(number, nbytes)
            just_copied = number


def smallest_memories(trace: Trace) -> dict[str, list[Memory]]:
    """Replay a trace in each of the three ways, and return the memories that each has used."""
    plain, one, rest_of_one, rest_of_two = (Memory() for _ in range(4))
    two = {name: Memory() for name in trace.long_lived}
    replay(trace, {}, plain)
    replay(trace, dict.fromkeys(trace.long_lived, one), rest_of_one)
    replay(trace, two, rest_of_two)
    return {"plain": [plain], "one arena": [one, rest_of_one], "two arenas": [*two.values(), rest_of_two]}


def report_replay(trace: Trace) -> None:
    memories = smallest_memories(trace)
    least = memories["plain"][0].most_live
    births = sum(change.nbytes > 0 for change in trace.changes)
    print(f"{births} storages; most alive at once {format_bytes(least)}; smallest memory:")
    for name, parts in memories.items():
        total = sum(memory.highest for memory in parts)
        pieces = " + ".join(format_bytes(memory.highest) for memory in parts)
        print(f"{name:10s} {format_bytes(total):>10s}, {100 * (total / least - 1):5.1f} % more  ({pieces})")


@dataclass(frozen=True)
class Probe:
    """The peak bytes that one process measured on its GPU; `fits` is False if it ran out of memory."""

    fits: bool
    allocated: int = 0
    reserved: int = 0


def probe(options: argparse.Namespace) -> Probe:
    """Take three steps of the engine on this process's GPU, and return the peak bytes."""
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(options.gpu_gib * 2**30 / total, 1.0), device)
    try:
        step, samples = engine_step(options, device, contiguous=options.probe == "contiguous")
        for _ in range(3):
            step(samples)
        torch.cuda.synchronize(device)
    except torch.cuda.OutOfMemoryError:
        return Probe(fits=False)
    return Probe(True, torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))


def engine_step(
    options: argparse.Namespace, device: torch.device, *, contiguous: bool
) -> tuple[Callable[[Tensor], None], Tensor]:
    """Return a function that takes a step of ZeRO stage 2 on one device, and the samples for it."""
    buffers = FusedBuffers(0, device)
    mesh = make_mesh(Topology(), 0, device, buffers)
    model = model_of(options, device)
    zero = ZeroConfig(zero_stage=2, contiguous_gradients=contiguous)
    settings = EngineSettings(zero, FusedAdamW(SETTINGS))
    engine = Engine(
        model, model.units(), resolve(zero, PrecisionConfig()), mesh=mesh, buffers=buffers, settings=settings
    )
    buffers.resize(engine.largest_buffer_bytes)

    def step(samples: Tensor) -> None:
        engine.begin_step()
        engine.backward(model.summed_loss(samples[:, :-1], samples[:, 1:]) / samples.numel(), is_last=True)
        engine.finish_reductions()
        engine.update(StepInputs(LR, torch.ones((), device=device), None))

    return step, samples_of(options, device)


def model_of(options: argparse.Namespace, device: torch.device) -> GPT:
    """Return the model, each of whose layers is recomputed in backward unless --no-recompute is given."""
    model = make_model(model_config(options), device)
    if options.recompute:
        for layer in model.layers.values():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def samples_of(options: argparse.Namespace, device: torch.device) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(VOCABULARY, (options.micro_batch_size, options.seq_length + 1), device=device)


def probe_in_process(arguments: list[str], kind: str, allocator: str, micro_batch_size: int) -> Probe:
    """Run a probe in a process of its own, whose allocator has not been used before."""
    command = [sys.executable, __file__, *arguments, "--probe", kind, "--micro-batch-size", str(micro_batch_size)]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": ALLOCATORS[allocator]}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return Probe(**json.loads(done.stdout.splitlines()[-1]))


def largest_that_fits(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, or 0 if 1 does not, provided that all smaller ones fit too.

    The number is doubled until it is too large, then the gap is halved.
    """
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def report_gpu(arguments: list[str], micro_batch_size: int) -> None:
    for allocator in ALLOCATORS:
        for kind in ("contiguous", "scattered"):
            seen = probe_in_process(arguments, kind, allocator, micro_batch_size)
            gap = format_bytes(seen.reserved - seen.allocated) if seen.fits else "does not fit"
            largest = largest_that_fits(partial(fits_in_process, arguments, kind, allocator))
            print(f"{kind:10s} gradients, allocator {allocator:19s}", end=" ")
            print(f"reserved - allocated {gap}; largest micro-batch {largest}", flush=True)


def fits_in_process(arguments: list[str], kind: str, allocator: str, micro_batch_size: int) -> bool:
    return probe_in_process(arguments, kind, allocator, micro_batch_size).fits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=True, help="layers in backward")
    parser.add_argument("--gpu-gib", type=float, default=8.0, help="memory of a GPU that the engine may use")
    parser.add_argument("--probe", choices=["contiguous", "scattered"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        print(json.dumps(asdict(probe(options))))
        return
    cpu = torch.device("cpu")
    tokens = f"{options.micro_batch_size} x {options.seq_length} tokens"
    print(f"{options.num_layers} layers of width {options.hidden_size}, {tokens}")
    report_replay(record_step(model_of(options, cpu), samples_of(options, cpu)))
    if torch.cuda.is_available():
        report_gpu(sys.argv[1:], options.micro_batch_size)


if __name__ == "__main__":
    sys.exit(main())
