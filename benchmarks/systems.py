"""The systems that `compare.py` compares: megazero and others, each training the same model on the same tokens.

A system is made by `make(name, place, work)` on every process of its job.  Systems other than megazero's run train
`plain_gpt.py` with torch's fused AdamW, but for Megatron-core, which has a GPT-2 of its own (`megatron_gpt.py`); the
record has the settings of each.  `library` is `megazero.initialize` around that model.  In bf16 megazero keeps
parameters and gradients in bf16 beside fp32 master weights, and so do DeepSpeed by its `bf16.enabled` and
Megatron-core, but with fp32 gradients, as in Megatron-LM; FSDP2 keeps fp32 shards, gathers and reduces in bf16
(`MixedPrecisionPolicy`); plain, compiled and DistributedDataParallel's models keep fp32 and compute under autocast.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch
from jobs import Place
from plain_gpt import ADAMW, CLIP, adamw, beside_gpt2, fill_, hollow_gpt, plain_gpt
from steps import LR, Steps, configuration
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_leaves

from megazero.config.model import ModelConfig
from megazero.data.loader import BatchLayout, MicroBatch, StepBatch, build_step_batch
from megazero.data.mock import MockSamples
from megazero.library.initialize import initialize
from megazero.zero.engine import Engine
from megazero.zero.plan import Home

SEED = 1
PLAIN = "plain"
# Megatron-core without ZeRO, and in stage 1.
MEGATRON = ("megatron-core", "megatron-core-1")
# The systems of one process, and of several; megazero-K is ZeRO stage K, and so are library-K and deepspeed-K.
# What ends in -cpu has optimizer states, and in stage 3 parameters too, in host memory; in -nvme, in files.  What ends
# in -keep keeps parameters gathered from forward to backward, as DeepSpeed's defaults have it.
ALONE = ("eager", "compiled", "library", "megazero")
TOGETHER = (
    "floor",
    "ddp",
    "ddp-view",
    "zero1-torch",
    "fsdp2",
    "fsdp2-keep",
    *(f"deepspeed-{stage}" for stage in range(4)),
    *MEGATRON,
    *(f"library-{stage}" for stage in range(4)),
    "library-3-keep",
    *(f"{system}-{stage}-cpu" for system in ("deepspeed", "library") for stage in (2, 3)),
    *(f"{system}-{stage}-nvme" for system in ("deepspeed", "library") for stage in (2, 3)),
    *(f"megazero-{stage}" for stage in range(4)),
)
# The package that a system needs beside torch and megazero.
PACKAGES: Mapping[str, str] = {
    **{f"deepspeed-{stage}": "deepspeed" for stage in (*range(4), "2-cpu", "3-cpu", "2-nvme", "3-nvme")},
    **dict.fromkeys(MEGATRON, "megatron.core"),
}
# Attributes of DeepSpeed's optimizers with model states other than parameters and torch's optimizer; version 0.19.
_DEEPSPEED_STATES = (
    "bit16_groups_flat",
    "single_partition_of_fp32_groups",
    "averaged_gradients",
    "grads_in_partition",
    "fp16_partitioned_groups_flat",
    "fp32_partitioned_groups_flat",
    "grad_partitions_flat_buffer",
    "bf16_groups_flat",
    "fp32_groups_flat_partition",
    "fp32_groups_gradients_flat",
)


@dataclass(frozen=True)
class Work:
    """The work of every system: the model, samples of a process in a step, "fp32" or "bf16", number of processes."""

    model: ModelConfig
    micro_batch_size: int
    precision: str
    world_size: int

    @property
    def tokens(self) -> int:
        """The number of tokens of a step, on all processes together."""
        return self.world_size * self.micro_batch_size * self.model.seq_length

    def flags(self) -> dict[str, Any]:
        """Return the model and the micro-batch as megazero's flags."""
        names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size")
        sizes = {name: getattr(self.model, name) for name in names}
        return {**sizes, **beside_gpt2(self.model), "micro_batch_size": self.micro_batch_size}

    def batch(self, number: int, place: Place) -> StepBatch:
        """Return a process's samples of step `number`; a single process has all of them, in several micro-batches."""
        assert self.model.vocab_size is not None, "made-up samples have a stated vocabulary"
        samples = MockSamples(self.model.vocab_size, self.model.seq_length, seed=1)
        total = self.world_size * self.micro_batch_size
        layout = BatchLayout(
            total,
            self.micro_batch_size,
            data_rank=place.launch.rank,
            data_size=place.launch.world_size,
            pins=place.device.type == "cuda",
        )
        return build_step_batch(samples, number * total, layout)


class States(Protocol):
    """A counter of model states, for the step that is taken between its two calls."""

    def begin(self) -> None: ...

    def end(self) -> int:
        """Return the bytes of model states on this process when the optimizer began its update."""


@dataclass(frozen=True)
class System:
    """A system that trains on this process.

    step: trains on this process's batch, waits for the end on the device, and returns the mean loss of this process's
    samples or of all.  settings: how it was set up, for the record.
    """

    step: Callable[[StepBatch], float]
    states: States
    settings: Mapping[str, Any]
    version: str = torch.__version__


def missing(name: str) -> str | None:
    """Return the package that a system needs if it isn't installed, otherwise None."""
    package = PACKAGES.get(name)
    if package is not None:
        try:
            version(package.replace(".", "-"))
        except PackageNotFoundError:
            return package
    return None


def make(name: str, place: Place, work: Work) -> System:
    """Make the system on this process, with its model's first values; its package must have been imported."""
    family, _, rest = name.partition("-")
    if family == "megazero":
        return _megazero(rest, place, work)
    if family == "deepspeed":
        return _deepspeed(rest, place, work)
    if family == "megatron":
        return _megatron(place, work, shards=rest == "core-1")
    if family == "fsdp2":
        return _fsdp2(place, work, reshards=rest != "keep")
    model = plain_gpt(work.model, SEED, place.device)
    if family == "library":
        return _library(rest or "0", model, place, work)
    if name == "compiled":
        return _plain(torch.compile(model), adamw(model, LR), place, work, model="torch.compile with its defaults")
    if name in ("eager", "floor", PLAIN):
        return _plain(model, adamw(model, LR), place, work, model="eager")
    return _replicated(name, model, place, work)


def _megazero(stage: str, place: Place, work: Work) -> System:
    """Make megazero's step as pretrain_gpt.py runs it, with its defaults for all that the flags don't set."""
    flags = {
        **work.flags(),
        "precision": work.precision,
        "seed": SEED,
        "adam_beta1": ADAMW.beta1,
        "adam_beta2": ADAMW.beta2,
        "adam_eps": ADAMW.eps,
        "weight_decay": ADAMW.weight_decay,
        "clip_grad": CLIP,
        **({"zero_stage": stage} if stage else {}),
    }
    steps = Steps(configuration(flags, work.world_size), place)
    return System(steps.take, _EngineStates(steps.core.engine), {"flags": flags}, metadata.version("megazero"))


def _loop_of(engine: Any, place: Place) -> Callable[[StepBatch], float]:
    """Return the training loop of a user of an engine, megazero's or DeepSpeed's: a step of one micro-batch."""

    def step(batch: StepBatch) -> float:
        [part] = batch.micro_batches
        loss = engine(*_sent(part, place.device))
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    return step


def _library(kind: str, model: nn.Module, place: Place, work: Work) -> System:
    """Make megazero's engine for a training loop of the user's, with its defaults and torch's optimizer.

    kind: the ZeRO stage, and behind it "cpu" or "nvme" for what lives in host memory or in files, or "keep".
    """
    stage, _, home = kind.partition("-")
    moved: dict[str, Any] = {}
    if home == "keep":
        moved["max_reuse_distance"] = 1_000_000_000
    elif home:
        moved = {"offload_optimizer": home, "offload_param": home if stage == "3" else "none"}
    if home == "nvme":
        moved["nvme_path"] = tempfile.gettempdir()
    config = {
        "train_micro_batch_size_per_gpu": work.micro_batch_size,
        "zero": {"zero_stage": int(stage), **moved},
        "precision": {"precision": work.precision},
        "gradient_clipping": CLIP,
    }
    engine = initialize(model, config, optimizer=adamw(model, LR))

    settings = {"config": config, "optimizer": "torch.optim.AdamW(fused=True)"}
    return System(_loop_of(engine, place), _EngineStates(engine.zero_engine), settings, metadata.version("megazero"))


class _EngineStates:
    """The model states that megazero's engine reports."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def begin(self) -> None:
        """Do nothing, since the engine reports them at any time."""

    def end(self) -> int:
        return sum(self._engine.model_state_bytes(home).total for home in Home)


def _plain(module: Callable[..., Tensor], adam: Optimizer, place: Place, work: Work, **settings: Any) -> System:
    """Make a system of autograd, torch's clipping and an optimizer.

    In bf16 it computes under autocast, unless FSDP2's `mp_policy` casts.
    """
    parameters = [parameter for group in adam.param_groups for parameter in group["params"]]
    device, casts = place.device, work.precision == "bf16" and "mp_policy" not in settings

    def step(batch: StepBatch) -> float:
        total = torch.zeros((), device=device)
        for part in batch.micro_batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=casts):
                loss = module(*_sent(part, device)) / len(batch.micro_batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        adam.step()
        adam.zero_grad()
        return total.item()

    told = {"optimizer": "torch.optim.AdamW(fused=True)", "autocast": "bf16" if casts else "none", **settings}
    return System(step, _StateCount(adam, parameters), told)


def _sent(part: MicroBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Start copying tokens and labels to the device, and return them."""
    return part.tokens.to(device, non_blocking=True), part.labels.to(device, non_blocking=True)


def _replicated(name: str, model: nn.Module, place: Place, work: Work) -> System:
    """Make DistributedDataParallel, with torch's ZeRO stage 1 or without."""
    views = name == "ddp-view"
    devices = [place.device] if place.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=views)
    if name != "zero1-torch":
        return _plain(wrapped, adamw(model, LR), place, work, gradient_as_bucket_view=views)
    optimizer = adamw(model, LR, partial(ZeroRedundancyOptimizer, optimizer_class=AdamW))
    return _plain(wrapped, optimizer, place, work, optimizer="ZeroRedundancyOptimizer(AdamW, fused=True)")


def _fsdp2(place: Place, work: Work, *, reshards: bool) -> System:
    """Make FSDP2 with every block as a unit, and the remaining parameters in the root.

    The model is made without memory before it is sharded, so that no process ever holds all of it.
    """
    model = hollow_gpt(work.model)
    mesh = init_device_mesh(place.device.type, (work.world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if work.precision == "bf16" else None)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=place.device)
    fill_(model, work.model, SEED)
    told = {"reshard_after_forward": reshards, "units": "blocks, root", "mp_policy": str(policy)}
    return _plain(model, adamw(model, LR), place, work, **told)


def _deepspeed(kind: str, place: Place, work: Work) -> System:
    """Make DeepSpeed's engine with its defaults and torch's optimizer, around a model that every process makes whole.

    In bf16 without ZeRO the engine makes moments by an update with gradients of zero, which AdamW would count as its
    first, and scale all later ones accordingly; so the count is set back to 0.

    kind: the ZeRO stage, and behind it "cpu" or "nvme" for what lives in host memory or in files.
    """
    stage, home, ahead = int(kind[0]), {"device": kind[2:]}, dict[str, bool]()
    if kind[2:] == "nvme":
        home |= {"nvme_path": tempfile.mkdtemp()}
        ahead = {"pipeline_read": True, "pipeline_write": True}
    of_parameters = {"offload_param": home} if stage == 3 else {}
    moved = {"offload_optimizer": home | ahead, **of_parameters} if kind[2:] else {}
    deepspeed: Any = import_module("deepspeed")
    model = plain_gpt(work.model, SEED, place.device)
    optimizer = adamw(model, LR)
    config = {
        "train_micro_batch_size_per_gpu": work.micro_batch_size,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, **moved},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": work.precision == "bf16"},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    counts = [state["step"] for state in optimizer.state.values()]
    for count in counts:
        count.zero_()

    settings = {"config": config, "optimizer": "torch.optim.AdamW(fused=True)"}
    if counts:
        settings["set_up"] = "one update with gradients of zero, its own; AdamW's count of updates begins anew"
    states = _StateCount(optimizer, model.parameters(), partial(_deepspeed_states, engine))
    return System(_loop_of(engine, place), states, settings, deepspeed.__version__)


def _deepspeed_states(engine: Any) -> Iterator[Tensor]:
    """Yield the tensors that DeepSpeed's own optimizer keeps beside torch's, and the partitions of parameters."""
    for parameter in engine.module.parameters():
        yield from _tensors(getattr(parameter, "ds_tensor", None))
    for name in _DEEPSPEED_STATES:
        yield from _tensors(getattr(engine.optimizer, name, None))


def _megatron(place: Place, work: Work, *, shards: bool) -> System:
    """Make Megatron-core's own model, wrapper and optimizer (`megatron_gpt.py`)."""
    dtype = torch.bfloat16 if work.precision == "bf16" else torch.float32
    gpt = import_module("megatron_gpt").MegatronGPT(work.model, place.device, dtype, lr=LR, seed=SEED, shards=shards)

    def step(batch: StepBatch) -> float:
        [part] = batch.micro_batches
        loss: Tensor = gpt.take(*_sent(part, place.device))
        return loss.item()

    states = _StateCount(gpt.optimizer, gpt.parameters(), gpt.buffers)
    return System(step, states, gpt.settings, metadata.version("megatron-core"))


class _StateCount:
    """A count of the bytes of parameters, gradients and optimizer states when the optimizer begins its update.

    An optimizer that updates in parts begins several times; then the largest count is kept.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Iterable[Tensor],
        others: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        # ZeroRedundancyOptimizer holds another optimizer, which keeps the states.
        self._inner: Optimizer = getattr(optimizer, "optim", optimizer)
        self._parameters = list(parameters)
        self._others = others
        self._counts = False
        self._nbytes = 0
        self._inner.register_step_pre_hook(lambda *_: self._count())

    def begin(self) -> None:
        self._counts = True

    def end(self) -> int:
        self._counts = False
        return self._nbytes

    def _count(self) -> None:
        if self._counts:
            self._nbytes = max(self._nbytes, storage_bytes(self._held()))

    def _held(self) -> Iterator[Tensor]:
        updated = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        for parameter in (*self._parameters, *updated):
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from _tensors(list(self._inner.state.values()))
        yield from self._others()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once; of a DTensor only this process's part."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in local)}
    return sum(storage.nbytes() for storage in storages.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value: a tensor, or nested lists and mappings of them."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
