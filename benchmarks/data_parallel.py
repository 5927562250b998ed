"""ZeRO stages 0 to 3 beside torch's DistributedDataParallel and FSDP2 (`fully_shard`): one model, the same ranks.

    torchrun --nproc-per-node 2 benchmarks/data_parallel.py [--rounds 6] [--steps 8] [--hidden-size 256]

Systems take turns in one run (A B C D A B C D ...), so that whatever else the machine does hits all alike; reported are
medians over all steps, their spread, and the ratio to DDP.  `alone` is the same work without communication: the floor.
Every system trains the same weights on the same tokens, and the losses at the end are printed beside the times.  One
more step of each, watched, gives the bytes alive at its peak (storages, over what was alive before the model was made)
and the bytes a rank sends, counted alike for all: with n ranks and a tensor of N bytes, all-gather and reduce-scatter
N (n-1)/n, all-reduce twice that.
"""

import argparse
import gc
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.comm.build import Launch, choose_device, join, leave, make_mesh
from megazero.comm.local import LocalCommunicator
from megazero.comm.mesh import Mesh
from megazero.config.model import ModelConfig
from megazero.config.precision import PrecisionConfig
from megazero.config.zero import ZeroConfig
from megazero.data.loader import MicroBatch, StepBatch
from megazero.data.mock import MockSamples
from megazero.memory.fused_buffers import FusedBuffers
from megazero.model.gpt import GPT
from megazero.model.initialize import initialize_
from megazero.optim.inner import AdamWSettings, FusedAdamW
from megazero.parallel.topology import Topology
from megazero.tensor_parallel.layers import TensorParallel
from megazero.tensor_parallel.random import RandomRegions
from megazero.timers import Timers
from megazero.train.step import StepControls, StepParts, training_step
from megazero.zero.engine import Engine, EngineSettings, ModelUnit
from megazero.zero.plan import resolve

VOCABULARY = 4096
SETTINGS = AdamWSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
LR = 3e-4


@dataclass
class System:
    """Something that trains: step(batch) returns the loss (DDP and alone: of this rank's samples)."""

    name: str
    step: Callable[[StepBatch], float]
    close: Callable[[], None] = lambda: None
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    sent_bytes: int = 0
    messages: int = 0


class StepWatch(TorchDispatchMode):
    """Bytes of live storages at every operation, measured anew since systems resize them, and collectives."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak_bytes = self.sent_bytes = self.messages = 0
        for thing in gc.get_objects():
            if isinstance(thing, Tensor) and type(thing).__name__ != "DTensor":
                self._meet(thing)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func.__name__.split(".")[0], max((_nbytes(tensor) for tensor in _tensors(args)), default=0))
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._meet(tensor)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes())
        return result

    def live_bytes(self) -> int:
        alive = (reference() for reference in self._live.values())
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def _meet(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            key = storage._cdata
            self._live[key] = weakref.ref(storage, lambda _: self._live.pop(key, None))

    def _count(self, name: str, nbytes: int) -> None:
        if name != "barrier":
            factor = 2 if name == "allreduce_" else 1
            self.messages += 1
            self.sent_bytes += factor * nbytes * (self._ranks - 1) // self._ranks


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Losses(nn.Module):
    """The mean loss as a forward, which is what DistributedDataParallel wraps."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.model.summed_loss(tokens, labels) / labels.numel()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="turns of every system; the first is a warm-up")
    add_work(parser)
    parser.add_argument(
        "--systems", nargs="+", default=["alone", "ddp", "zero-0", "zero-1", "zero-2", "zero-3", "fsdp2"], help="which"
    )
    return parser.parse_args()


def add_work(parser: argparse.ArgumentParser) -> None:
    """Options that say what a turn trains."""
    parser.add_argument("--steps", type=int, default=8, help="steps of a turn")
    parser.add_argument("--num-layers", type=int, default=8, help="blocks")
    parser.add_argument("--hidden-size", type=int, default=256, help="width")
    parser.add_argument("--seq-length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--micro-batch-size", type=int, default=2, help="samples of a rank and step")


def model_config(options: argparse.Namespace) -> ModelConfig:
    return ModelConfig(
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        num_attention_heads=options.hidden_size // 64,
        seq_length=options.seq_length,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def meet() -> Mesh:
    """All ranks of the launch as one data-parallel axis."""
    launch = Launch.from_environment()
    device = choose_device("auto", launch.local_rank)
    join(launch, backend="auto", device=device, timeout_minutes=10)
    return make_mesh(Topology(dp=launch.world_size), launch.rank, device, FusedBuffers(0, device))


def make_model(config: ModelConfig, device: torch.device) -> GPT:
    context = TensorParallel(LocalCommunicator(), RandomRegions(1, 0, device), torch.float32, device)
    model = GPT(config, vocab_size=VOCABULARY, tp=context, padded_vocab_size=VOCABULARY)
    initialize_(model, 1)
    return model


def plain_system(name: str, module: nn.Module, device: torch.device) -> System:
    """Losses or its DDP wrapper, with torch's fused AdamW."""
    parameters = list(module.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": SETTINGS.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(SETTINGS.beta1, SETTINGS.beta2), eps=SETTINGS.eps, fused=True)

    def step(batch: StepBatch) -> float:
        part = batch.micro_batches[0]
        loss = module(part.tokens.to(device), part.labels.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return System(name, step)


def zero_system(stage: int, config: ModelConfig, shared: Mesh, num_positions: int) -> System:
    """The engine, through the step that pretrain_gpt.py runs."""
    buffers = FusedBuffers(0, shared.device)
    mesh = make_mesh(shared.topology, shared.rank, shared.device, buffers)  # one pool for engine and collectives
    model = make_model(config, mesh.device)
    units = [ModelUnit(unit.name, tuple(unit.parameters), unit.consumers) for unit in model.units()]
    zero = ZeroConfig(zero_stage=stage)
    plan = resolve(zero, PrecisionConfig())
    settings = EngineSettings(zero, FusedAdamW(SETTINGS))
    engine = Engine(model, units, plan, mesh=mesh, buffers=buffers, settings=settings)
    buffers.resize(engine.largest_buffer_bytes)
    parts = StepParts(
        engine=engine,
        model=model,
        mesh=mesh,
        dropout=RandomRegions(1, 0, mesh.device),
        timers=Timers(mesh.device, waits=False),
        num_positions=num_positions,
        clip_grad=1.0,
        checks_overflow=False,
    )

    def step(batch: StepBatch) -> float:
        return training_step(parts, batch, StepControls(LR, 1.0)).loss.item()

    return System(f"zero-{stage}", step, engine.close)


def sharded_system(config: ModelConfig, device: torch.device) -> System:
    """FSDP2: every block, and what is left in the root."""
    module = Losses(make_model(config, device))
    for block in module.model.layers:
        fully_shard(block)
    fully_shard(module)
    return plain_system("fsdp2", module, device)


def make_system(name: str, config: ModelConfig, mesh: Mesh, num_positions: int) -> System:
    if name == "fsdp2":
        return sharded_system(config, mesh.device)
    if name.startswith("zero-"):
        return zero_system(int(name[-1]), config, mesh, num_positions)
    losses = Losses(make_model(config, mesh.device))
    return plain_system(name, DistributedDataParallel(losses) if name == "ddp" else losses, mesh.device)


def watch_one_step(name: str, config: ModelConfig, mesh: Mesh, options: argparse.Namespace) -> StepWatch:
    """A fresh system's third step: by then moments, buffers and records are there."""
    gc.collect()
    before = StepWatch(mesh.topology.dp).live_bytes()
    system = make_system(name, config, mesh, options.micro_batch_size * mesh.topology.dp * options.seq_length)
    for number in range(2):
        system.step(batch_of(number, mesh, options))
    batch = batch_of(2, mesh, options)
    watch = StepWatch(mesh.topology.dp)
    with watch:
        system.step(batch)
    watch.peak_bytes -= before
    system.close()
    return watch


def batch_of(number: int, mesh: Mesh, options: argparse.Namespace) -> StepBatch:
    """This rank's samples of one step."""
    source = MockSamples(VOCABULARY, options.seq_length, seed=1)
    rows = options.micro_batch_size
    first = (number * mesh.topology.dp + mesh.coordinate("dp")) * rows
    samples = torch.stack([torch.from_numpy(source.sample(first + row)) for row in range(rows)])
    return StepBatch(first, [MicroBatch(first, samples[:, :-1], samples[:, 1:], None)])


def take_turn(system: System, mesh: Mesh, options: argparse.Namespace, turn: int) -> None:
    """Some steps of one system; a barrier first, so that nobody pays for the system before."""
    for number in range(turn * options.steps, (turn + 1) * options.steps):
        batch = batch_of(number, mesh, options)
        mesh.world.barrier()
        start = time.perf_counter()
        loss = system.step(batch)
        if turn:
            system.seconds.append(time.perf_counter() - start)
        system.losses.append(loss)


def report(systems: list[System], numel: int) -> None:
    base = statistics.median(next((s for s in systems if s.name == "ddp"), systems[0]).seconds)
    print(f"{numel / 1e6:.1f}M parameters, torch {torch.__version__}, {torch.get_num_threads()} threads a rank")
    for system in systems:
        median = statistics.median(system.seconds)
        low, _, high = statistics.quantiles(system.seconds, n=4)
        print(
            f"{system.name:7s} {1000 * median:7.1f} ms ({1000 * low:.1f} to {1000 * high:.1f}), {median / base:.2f} DDP"
            f"  peak {system.peak_bytes / 1e6:6.1f} MB, {system.peak_bytes / numel:4.1f} B a parameter"
            f"  sent {system.sent_bytes / numel / 4:4.2f} x 4 B a parameter, {system.messages:3d} messages"
            f"  loss {system.losses[0]:.4f} -> {system.losses[-1]:.4f}"
        )


def main() -> None:
    options = parse_arguments()
    mesh, config = meet(), model_config(options)
    num_positions = options.micro_batch_size * mesh.topology.dp * options.seq_length
    watched = {name: watch_one_step(name, config, mesh, options) for name in options.systems}
    systems = [make_system(name, config, mesh, num_positions) for name in options.systems]
    for system in systems:
        watch = watched[system.name]
        system.peak_bytes, system.sent_bytes, system.messages = watch.peak_bytes, watch.sent_bytes, watch.messages
    for turn in range(options.rounds):
        for system in systems:
            take_turn(system, mesh, options, turn)
    if mesh.rank == 0:
        report(systems, sum(parameter.numel() for parameter in make_model(config, mesh.device).parameters()))
    for system in systems:
        system.close()  # gathers of updated parameters may still be in flight
    leave()


if __name__ == "__main__":
    sys.exit(main())
