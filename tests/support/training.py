"""Trains on real ranks through the code that a user runs, and compares the outcome with the plain reference.

A *cell* is one layout with its options.  All cells train the same awkward model on the same real text (the source of a
module of the standard library, as bytes) with the same global batches, so that one reference serves them all.
"""

import argparse
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.configs import make_run
from support.flat_layout import padded_numel
from support.late_copies import late_copies
from support.models import box_index, build_gpt, context
from support.processes import mesh_in_worker, run_ranks
from support.reference import Batch, History, Recipe, Shape, scheduled_rate, train
from support.token_files import write_corpus
from torch import Tensor

from megazero.checkpoint.slices import fragment_pieces, piece_view
from megazero.comm.mesh import ACTIVATIONS, GRADIENTS, Mesh
from megazero.config import derived
from megazero.config.lengths import RunLength
from megazero.config.model import ModelConfig
from megazero.config.run import RunConfig
from megazero.data.loader import BatchLoader
from megazero.memory.fused_buffers import FusedBuffers
from megazero.model.gpt import INPUT_AND_OUTPUT
from megazero.model.initial_values import initial_value
from megazero.optim.loss_scaler import LossScaler
from megazero.optim.schedules import LearningRate
from megazero.parallel.nodes import Nodes
from megazero.parallel.param_spec import ParamSpec, StateFragment, named_specs
from megazero.parallel.topology import ENDS
from megazero.train.build import batch_layout, build_components, step_context
from megazero.train.components import RunComponents
from megazero.train.start.inputs import open_inputs
from megazero.train.step import StepControls, training_step
from megazero.zero.home_traffic import HomeTraffic
from megazero.zero.plan import Home

SCHEDULE, WARMUP = 5, 2  # the steps of the warm-up and the decay
STEPS = 3  # the warm-up, after which a few cells go on through the decay
GLOBAL_BATCH = 16
LR = 3e-3

# Every option but the layout: a model of inconvenient sizes, no dropout, effective clipping, warm-up, decay.
SETTINGS: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 60,
    "num_attention_heads": 12,
    "seq_length": 24,
    "vocab_size": 257,
    "make_vocab_size_divisible_by": 1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.08,
    "global_batch_size": GLOBAL_BATCH,
    "train_iters": SCHEDULE,
    "lr": LR,
    "min_lr": LR / 10,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": WARMUP,
    "weight_decay": 0.1,
    "clip_grad": 0.5,
    "reduce_bucket_size": 12_000,
    "split": "1",
    "eval_iters": 0,
    "mock_data": False,
}


@dataclass(frozen=True)
class Cell:
    """A layout with its options.

    accumulation: micro-batches of a step; settings: further settings of the run; fault: one of FAULTS to plant in the
    run, or "" for none.  nodes: ranks of each node; (): one node has all.
    """

    tp: int = 1
    dp: int = 1
    stage: int = 0
    accumulation: int = 1
    precision: str = "fp64"
    steps: int = STEPS
    settings: dict[str, Any] = field(default_factory=dict)
    fault: str = ""
    pp: int = 1
    nodes: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        return self.tp * self.dp * self.pp

    def config(self, prefix: str) -> RunConfig:
        batch = self.settings.get("global_batch_size", GLOBAL_BATCH)
        layout = {
            "micro_batch_size": batch // (self.dp * self.accumulation),
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "zero_stage": self.stage,
            "precision": self.precision,
            "data_path": [prefix],
        }
        return make_run(**{**SETTINGS, **layout, **self.settings})

    def with_settings(self, settings: Mapping[str, Any]) -> "Cell":
        """Return the cell with further settings."""
        return replace(self, settings={**self.settings, **settings})

    def __str__(self) -> str:
        extra = f" {self.settings}" if self.settings else ""
        layout = f"tp{self.tp} pp{self.pp} dp{self.dp} zero{self.stage} accumulation{self.accumulation}"
        return f"{layout} {self.precision}{extra}{self.fault and f' wrong {self.fault}'}"


class Saved(NamedTuple):
    """A box of a full tensor that one rank owns."""

    name: str
    kind: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor


@dataclass
class Outcome:
    """The outcome of a training run on one rank."""

    losses: list[float]
    grad_norms: list[float]
    skipped: list[bool]
    saved: list[Saved]
    comm_bytes: dict[str, dict[str, int]]
    model_state_bytes: dict[str, int]
    layout: tuple[int, int]  # elements of this rank's trainable parameters, with and without padding
    unit_numel: dict[str, int]  # elements of this rank's parameters with padding, by unit
    gathered_numel: tuple[int, int]  # elements of gathered parameters: now, and at most
    persistent_numel: int  # elements of parameters that are not partitioned
    seconds: float
    host_states: dict[str, int]
    file_states: dict[str, int]
    announced: tuple[HomeTraffic, HomeTraffic]  # what a step moves by what is allocated; the same without gathers

    def full(self, others: Iterable["Outcome"], kind: str = "weight") -> dict[str, Tensor]:
        """Assemble full tensors from the boxes that all ranks own."""
        return assemble(piece for outcome in (self, *others) for piece in outcome.saved if piece.kind == kind)


def write_text_corpus(folder: Path) -> str:
    """Write a corpus of real text with one token id a byte, and return its prefix."""
    text = inspect.getsource(argparse).encode()
    documents = [[list(part)] for part in text.split(b"\n\n") if part]
    return write_corpus(folder / "text", documents)


def train_cell(cell: Cell, prefix: str, *, copies_late: bool = False) -> list[Outcome]:
    """Train on real ranks and return one outcome a rank; copies_late: those of homes, as `late_copies` makes them."""
    return run_ranks(cell.world_size, train_late_on_rank if copies_late else train_on_rank, cell, prefix)


def train_late_on_rank(rank: int, cell: Cell, prefix: str) -> Outcome:
    """Train as `train_on_rank` does, with copies of homes that finish late, into memory that is full of NaN."""
    with late_copies():
        return train_on_rank(rank, cell, prefix)


def train_on_rank(rank: int, cell: Cell, prefix: str) -> Outcome:
    """Run the training loop without its reporting: batches from the loader, steps by `training_step`."""
    config = cell.config(prefix)
    nodes = Nodes(cell.nodes) if cell.nodes else None
    mesh = mesh_in_worker(rank, tp=cell.tp, dp=cell.dp, pp=cell.pp, zero=config.zero, nodes=nodes)
    mesh = faulty(mesh, cell.fault)
    core = build_components(config, mesh, FusedBuffers(0, mesh.device), vocab_size=config.model.vocab_size or 0)
    start = time.perf_counter()
    figures, comm_bytes = run_steps(config, core, cell.steps)
    seconds = time.perf_counter() - start
    saved = [box for fragment in core.engine.owned_state() for box in boxes(fragment)]
    states = asdict(core.engine.model_state_bytes())
    layout = (padded_numel(core.engine.layout, trainable=True), core.engine.layout.used_numel(trainable=True))
    unit_numel = {section.unit: section.numel for section in core.engine.layout.sections}
    gathered = core.engine.gathered_numel
    persistent = sum(section.numel for section in core.engine.layout.sections if not section.partitioned)
    away = [asdict(core.engine.model_state_bytes(home)) for home in (Home.HOST, Home.FILE)]
    announced = core.engine.home_traffic(cell.accumulation), core.engine.home_traffic(cell.accumulation, num_gathers=0)
    core.engine.close()
    return Outcome(
        *zip_figures(figures),
        saved,
        comm_bytes,
        states,
        layout,
        unit_numel,
        gathered,
        persistent,
        seconds,
        *away,
        announced,
    )


def run_steps(
    config: RunConfig, core: RunComponents, steps: int
) -> tuple[list[tuple[float, float, bool]], dict[str, Any]]:
    """Return (loss, gradient norm, skipped) of every step, and the traffic of the last in bytes by axis."""
    inputs = open_inputs(config.data, config.model, seed=config.training.seed, evaluates=False)
    parts = step_context(config, core)
    scaler = LossScaler.from_config(config.precision)
    scale, done = scaler.start(), 0
    sizes = derived.step_sizes(config, core.mesh.topology.world_size)
    rate = LearningRate.from_config(config.optimizer, RunLength(config.training.train_iters or 0, sizes))
    figures = []
    layout, rows = batch_layout(config, core.mesh, inputs.eod), derived.row_lengths(config)
    with BatchLoader(inputs.train, layout, prefetch=0, sizes=sizes, lengths=rows) as loader:
        for _ in range(steps):
            core.mesh.meter.reset()
            progress = rate.progress(done, loader.consumed_samples)
            controls = StepControls(rate.at(progress), scale.scale, decoupled_lr=rate.decoupled_at(progress))
            report = training_step(parts, next(loader), controls)
            skipped = bool(report.skipped.item())
            done += not skipped
            scale = scaler.after_step(scale, overflow=skipped)
            figures.append((report.loss.item(), report.grad_norm.item(), skipped))
    return figures, core.mesh.meter.bytes_by_axis()


def zip_figures(figures: list[tuple[float, float, bool]]) -> tuple[list[float], list[float], list[bool]]:
    losses, norms, skipped = zip(*figures, strict=True)
    return list(losses), list(norms), list(skipped)


def boxes(fragment: StateFragment) -> list[Saved]:
    """Return the boxes of a fragment, without padding."""
    return [
        Saved(
            fragment.spec.name,
            fragment.kind,
            fragment.spec.full_shape,
            piece.box.offset,
            piece_view(fragment.tensor, piece).clone(),
        )
        for piece in fragment_pieces(fragment.spec, fragment.start, fragment.stop)
    ]


def assemble(pieces: Iterable[Saved]) -> dict[str, Tensor]:
    """Assemble full tensors by name; every element must have exactly one owner."""
    full: dict[str, Tensor] = {}
    owners: dict[str, Tensor] = {}
    for piece in pieces:
        whole = full.setdefault(piece.name, torch.zeros(piece.full_shape, dtype=piece.values.dtype))
        owned = owners.setdefault(piece.name, torch.zeros(piece.full_shape, dtype=torch.int32))
        place = box_index(piece.offset, tuple(piece.values.shape))
        whole[place] = piece.values
        owned[place] += 1
    for name, owned in owners.items():
        assert bool((owned == 1).all()), f"{name}: elements with owners other than one"
    return full


def reference_history(
    prefix: str,
    steps: int = STEPS,
    *,
    late_from: int | None = None,
    cut: Callable[[int], int] | None = None,
    **settings: Any,
) -> History:
    """Train the plain single-process float64 reference on the same text, with `settings` over those of all cells.

    late_from: as for `Recipe`.  cut: returns the tokens to which the rows of a step, counted from 0, are cut.
    """
    config = Cell(settings=settings).config(prefix)
    inputs = open_inputs(config.data, config.model, seed=config.training.seed, evaluates=False)
    batches, sizes = [], derived.step_sizes(config, 1)
    for step in range(steps):
        samples = range(sizes.samples_after(step), sizes.samples_after(step + 1))
        rows = [torch.from_numpy(inputs.train.sample(sample)) for sample in samples]
        batch = torch.stack(rows)
        tokens, data = batch[:, :-1], config.data
        mask = (tokens != inputs.eod).double() if data.eod_mask_loss else None
        learnt = [inputs.train.loss_mask(sample) for sample in samples]
        for row, found in enumerate(learnt):
            if found is not None:
                mask = torch.ones(tokens.shape).double() if mask is None else mask
                mask[row] *= torch.from_numpy(found[1:] > 0)
        assert data.reset_position_ids == data.reset_attention_mask, "the twin knows documents, or none"
        length = tokens.shape[1] if cut is None else cut(step)
        mask = None if mask is None else mask[:, :length]
        labels = batch[:, 1 : length + 1]
        batches.append(Batch(tokens[:, :length], labels, mask, inputs.eod if data.reset_attention_mask else None))
    progress = sizes.samples_after if len(sizes.sizes) > 1 else int
    warmup, decay = progress(WARMUP), progress(SCHEDULE)
    recipe = Recipe(
        lambda step: scheduled_rate(
            progress(step), peak=LR, final=LR / 10, warmup=warmup, decay_steps=decay, style="cosine"
        ),
        weight_decay=0.1,
        max_norm=0.5,
        factors=dict.fromkeys(INPUT_AND_OUTPUT, (config.optimizer.decoupled_lr or LR) / LR),
        late_from=late_from,
    )
    weights = first_weights(config)
    if config.model.lora_rank:
        recipe = replace(recipe, frozen=frozenset(name for name in weights if ".adapter." not in name))
    return train(weights, batches, recipe, shape_of(config.model))


def shape_of(model: ModelConfig) -> Shape:
    """Return what the plain reference needs of a model beside its weights."""
    kind = model.position_embedding_type
    return Shape(
        epsilon=model.norm_epsilon,
        positions=kind if kind in ("rope", "alibi") else "",
        base=model.rotary_base,
        rotated=int((model.kv_channels or model.hidden_size // model.num_attention_heads) * model.rotary_percent),
        interpolation=model.rotary_seq_len_interpolation_factor,
        stretch=model.rope_scaling_factor if model.use_rope_scaling else None,
        squares=model.squared_relu,
        adapters=(model.lora_alpha or model.lora_rank) / (model.lora_rank or 1),
    )


def first_weights(config: RunConfig) -> dict[str, Tensor]:
    """Return the initial weights as full logical tensors in float64."""
    mesh_specs = _single_specs(config)
    return {spec.name: initial_value(spec, config.training.seed).view(spec.full_shape).double() for spec in mesh_specs}


def _single_specs(config: RunConfig) -> list[ParamSpec]:
    model = build_gpt(config.model, context(), vocab_size=config.model.vocab_size or 0)
    return [spec for spec, _ in named_specs(model)]


# For each fault by name: the communicator and its call that go wrong once.
FAULTS = {
    "dp": ("dp", "reduce_scatter_into"),
    "tp": ("tp", "all_reduce"),
    "tp, split sequence": ("tp", "reduce_scatter_into"),
    "pp, activations": (ACTIVATIONS, "send"),
    "pp, gradients": (GRADIENTS, "send"),
    "ends": (ENDS, "all_reduce"),
}


def faulty(mesh: Mesh, fault: str) -> Mesh:
    """Return the mesh with one communicator that makes one mistake; fault: one of FAULTS, or "" for the mesh itself."""
    if not fault:
        return mesh
    key, call = FAULTS[fault]
    return replace(mesh, communicators={**mesh.communicators, key: _Wrong(mesh.communicators[key], call)})


class _Wrong:
    """A communicator that passes all calls on, but doubles one element in the third call of one kind."""

    def __init__(self, inner: Any, call: str) -> None:
        self._inner = inner
        self._call = call
        self._calls = 0
        self._kept: list[Tensor] = []  # tensors under way, which must stay alive

    def __getattr__(self, name: str) -> Any:
        return self._go_wrong if name == self._call else getattr(self._inner, name)

    def _go_wrong(self, *args: Any, **options: Any) -> Any:
        self._calls += 1
        if self._calls == 3:
            args = self._changed(args)
        return getattr(self._inner, self._call)(*args, **options)

    def _changed(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments with a changed tensor.

        An all-reduce works in place; other calls read their last tensor, which is copied, as other code may use it too.
        """
        place = max(index for index, value in enumerate(args) if isinstance(value, Tensor))
        tensor = args[place] if self._call == "all_reduce" else args[place].clone()
        tensor.view(-1)[0] *= 2
        self._kept.append(tensor)
        return (*args[:place], tensor, *args[place + 1 :])


@dataclass(frozen=True)
class Deviation:
    """The relative errors of a run against the reference; `weight` is the name of the weight with the largest error."""

    losses: float
    grad_norms: float
    weights: float
    weight: str

    @property
    def worst(self) -> float:
        return max(self.losses, self.grad_norms, self.weights)


def deviation(outcomes: Sequence[Outcome], reference: History) -> Deviation:
    """Return the largest relative errors over the losses and norms of every rank and step, and over final weights."""
    weights = weight_errors(outcomes[0].full(outcomes[1:]), reference.weights, LR)
    weight = max(weights, key=lambda name: weights[name])
    return Deviation(
        losses=max(max_relative(outcome.losses, reference.losses) for outcome in outcomes),
        grad_norms=max(max_relative(outcome.grad_norms, reference.grad_norms) for outcome in outcomes),
        weights=weights[weight],
        weight=weight,
    )


def max_relative(measured: list[float], expected: list[float]) -> float:
    """Return the largest relative difference between two lists of figures."""
    return max(abs(a - b) / abs(b) for a, b in zip(measured, expected, strict=True))


def weight_errors(measured: dict[str, Tensor], expected: dict[str, Tensor], learning_rate: float) -> dict[str, float]:
    """Return max|measured - expected| / max(max|expected|, learning rate) by name."""
    assert measured.keys() == expected.keys()
    return {
        name: float((measured[name] - value).abs().max() / max(float(value.abs().max()), learning_rate))
        for name, value in expected.items()
    }
