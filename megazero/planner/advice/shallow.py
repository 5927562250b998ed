"""Memory and time of a job from dry runs of two shallow models with few micro-batches.

Layers in the middle of a stage are alike, and so are micro-batches in the middle of a step.  Every chunk of a pipeline
loses the same number of layers, so that the one that binds remains the one, and the two depths differ by a layer of
every chunk.  What a figure is more at the greater depth, it is more for each of the layers in between.  One more
micro-batch costs the longest stage's forward and backward, and what it keeps until its backward while it is in flight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megazero.config import derived
from megazero.config.run import RunConfig
from megazero.memory.ledger_figures import CATEGORIES, StepMemory
from megazero.parallel.topology import SHARDS
from megazero.pipeline.passes import most_in_flight_total
from megazero.pipeline.schedule import Action, Kind
from megazero.planner.dry.rank import DryJob, RankRecord
from megazero.planner.hardware import Hardware
from megazero.planner.job_plan import DryRuns, Plan, constants
from megazero.planner.predict import forecast_of
from megazero.planner.seconds import StepTime
from megazero.planner.trace import Part
from megazero.report.metrics import flops_per_token
from megazero.train.pipeline_stages import pipeline_split, stage_plan
from megazero.zero.layout import prefetch_limit
from megazero.zero.plan import Placement, resolve

PARTS: tuple[Part, ...] = ("start-up", "first step", "steady step")
_STEPS = PARTS[1:]
_HELD = ("activations", "activation_checkpoints")
_STATED = "context, workspaces, communicators"
_BEYOND = "rounding and fragments"


class Depths(NamedTuple):
    """The chunks' layers of the shallower sample, and the layers that every chunk has more in the job itself."""

    split: tuple[int, ...]
    more: int


@dataclass(frozen=True)
class Measured:
    """The memory and the time of a job, as its samples let expect.

    memory: bytes of the fullest device by category, with rounding and what the machine states.  place: rank and part.
    host_bytes: of a node.  plans: the samples, one where the job is as shallow.  depth, width: the layers of every
    chunk and the micro-batches that the job has more than the first of them.  step: the last sample's.
    """

    job: DryJob
    plans: tuple[Plan, ...]
    depth: int
    width: int
    memory: Mapping[str, int]
    place: tuple[int, str]
    host_bytes: int
    step: StepTime
    seconds: float

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    @property
    def cached(self) -> int:
        """The bytes that the device's allocator needs: all but what the machine states."""
        return self.total - self.memory[_STATED]

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        config = self.job.config
        return derived.global_batch_size(config, self.job.world_size) * config.model.seq_length

    @property
    def mfu(self) -> float:
        """Model FLOPs by the peak of all devices."""
        config = self.job.config
        flops = self.tokens * flops_per_token(config.model, vocab_size=self.job.vocab_size)
        peak = self.plans[0].hardware.peak(config.precision.precision) * self.job.world_size
        return min(flops / self.seconds / peak, 1.0)

    @property
    def fullest(self) -> str:
        """The category that has most of the memory."""
        return max(self.memory, key=lambda name: self.memory[name])

    def fits(self, hardware: Hardware) -> bool:
        """Return True if a device and a node's host memory have room."""
        has_host = hardware.host_memory_bytes
        return self.total <= hardware.memory_bytes and (not has_host or self.host_bytes <= has_host)

    def seconds_on(self, hardware: Hardware) -> float:
        """Return the seconds of a step on another machine."""
        steps = [forecast_of(replace(plan, hardware=hardware)).step for plan in self.plans]
        return _seconds(steps, self.depth, self.width)


def depths(job: DryJob) -> Depths:
    """Return the depths of the samples; `more` is 0 where the job itself is shallow enough."""
    config = job.config
    if config.parallel.pipeline_model_parallel_size == 1:
        split: tuple[int, ...] = (config.model.num_layers,)
    else:
        split = pipeline_split(config, derived.vocab_rows(config, job.vocab_size))
    # With partitioned parameters a layer's gather runs beside its neighbours, of which the shallow model has one too;
    # and where checkpoints are copies, a recomputed layer's input is alive beside the output of the one before.
    is_gathered = resolve(config.zero, config.precision).parameter.placement is Placement.PARTITIONED
    least = 2 if config.activations.recompute_granularity == "full" else 1
    if is_gathered:
        least = 3 + _layers_ahead(job)
    ends = [layers - 1 if layers else 0 for layers in (split[0], split[-1])]
    more = max(min([*(layers - least for layers in split[1:-1]), *ends, max(split) - least]), 0)
    return Depths(tuple(layers - more for layers in split), more) if more > 1 else Depths(split, 0)


def _layers_ahead(job: DryJob) -> int:
    """Return the layers beyond the largest unit's elements that the prefetch window has room for."""
    config, slices = job.config, job.topology.tp
    layer = derived.block_matrices(config.model) // slices
    largest = max(layer, derived.vocab_rows(config, job.vocab_size) * config.model.hidden_size // slices)
    window = prefetch_limit(job.topology.size(SHARDS), largest, config.zero.prefetch_bucket_size)
    return max(window - largest, 0) // layer if config.zero.overlap_comm else 0


def micro_batches(config: RunConfig, count: int) -> int:
    """Return the micro-batches of the samples: the first and the last, or a turn of an interleaved schedule."""
    turn = config.parallel.pipeline_model_parallel_size if derived.num_virtual_chunks(config) > 1 else 2
    return min(turn, count)


def measure(job: DryJob, hardware: Hardware, samples: DryRuns | None = None) -> Measured:
    """Return what a job takes on a machine; samples: those of other jobs so far."""
    shared = DryRuns() if samples is None else samples
    found = depths(job)
    few = micro_batches(job.config, job.num_micro_batches)
    splits = [found.split] + [tuple(layers + 1 for layers in found.split)] * (found.more > 0)
    plans = tuple(shared.plan(_shallow(job, split, few), hardware, parts=PARTS) for split in splits)
    return _measured(job, plans, found.more, job.num_micro_batches - few)


def with_layers(found: Measured, layers: int) -> Measured:
    """Return what the same job takes with another number of layers, by the same two samples.

    The job has one pipeline stage and more layers than its samples, before and after.
    """
    model = found.job.config.model
    job = replace(found.job, config=replace(found.job.config, model=replace(model, num_layers=layers)))
    more = depths(job).more
    assert job.topology.pp == 1 and found.depth > 0 and more > 0
    return _measured(job, found.plans, more, found.width)


def _measured(job: DryJob, plans: tuple[Plan, ...], depth: int, width: int) -> Measured:
    """Return what a job takes by its samples; depth, width: as of `Measured`."""
    steps = [forecast_of(plan).step for plan in plans]
    needs = {
        (rank.trace.rank, part): _extrapolated(
            [_memory_of(plan, plan.ranks[place], part, job) for plan in plans], depth
        )
        for place, rank in enumerate(plans[0].ranks)
        for part in PARTS
    }
    fullest = max(needs, key=lambda key: sum(needs[key].values()))
    host = _extrapolated([{"": float(plan.host_bytes)} for plan in plans], depth)[""]
    seconds = _seconds(steps, depth, width)
    return Measured(job, plans, depth, width, needs[fullest], fullest, host, steps[-1], seconds)


def _extrapolated(samples: Sequence[Mapping[str, float]], more: int) -> dict[str, int]:
    """Return figures at `more` times the difference of two samples beyond the first.

    Fragments are no line: their share of the tensors is taken for that of the deeper sample.
    """
    first, last = samples[0], samples[-1]
    found = {name: round(first[name] + more * (last[name] - first[name])) for name in first}
    if more and _BEYOND in found:
        found[_BEYOND] = round(last[_BEYOND] / max(_tensors(last), 1) * _tensors(found))
    return found


def _tensors(figures: Mapping[str, float]) -> float:
    return sum(nbytes for name, nbytes in figures.items() if name not in (_BEYOND, _STATED))


def _seconds(steps: Sequence[StepTime], depth: int, width: int) -> float:
    """Return the seconds of a step from those of the samples."""
    first, last = (step.seconds + width * _one_more(step) for step in (steps[0], steps[-1]))
    return first + depth * (last - first)


def _shallow(job: DryJob, split: Sequence[int], count: int) -> DryJob:
    """Return the job with so many layers in every chunk, and so many micro-batches."""
    config = job.config
    layers, stages, chunks = sum(split), job.topology.pp, derived.num_virtual_chunks(config)
    parallel = replace(
        config.parallel,
        pipeline_split=",".join(map(str, split)) if stages > 1 else None,
        num_layers_per_virtual_pipeline_stage=layers // (stages * chunks) if chunks > 1 else None,
    )
    size = count * config.training.micro_batch_size * job.topology.dp
    training = replace(config.training, global_batch_size=size, rampup_batch_size=(), step_batch_size_schedule=())
    model = replace(config.model, num_layers=layers)
    return replace(job, config=replace(config, model=model, parallel=parallel, training=training))


def _one_more(step: StepTime) -> float:
    """Return the seconds of one more micro-batch: the forward of the second and the backward of the first."""
    names = ("F1", "B0", "I0", "W0")
    return max(sum(stage.parts.get(name, 0.0) for name in names) for stage in step.stages)


def _memory_of(plan: Plan, rank: RankRecord, part: Part, job: DryJob) -> dict[str, float]:
    """Return the bytes that a part of a rank needs with all micro-batches of the job."""
    record = rank.parts[part]
    found: dict[str, float] = {name: record.memory.at_peak[name] for name in CATEGORIES}
    found[_BEYOND] = record.needed - sum(found.values())
    found[_STATED] = sum(constants(plan.hardware, rank).values())
    if part in _STEPS:
        stage = rank.trace.coordinates["pp"]
        few, whole = (stage_plan(one.config, stage).step(one.num_micro_batches).actions for one in (plan.job, job))
        more = most_in_flight_total(whole) - most_in_flight_total(few)
        name = "activations" if record.memory.at_peak["activation_checkpoints"] == 0 else "activation_checkpoints"
        found[name] += more * _kept(record.memory, few) if more else 0
    return found


def _kept(memory: StepMemory, actions: Sequence[Action]) -> float:
    """Return the bytes that a micro-batch in flight keeps on the device: those alive when the first backward begins."""
    computations = [action for action in actions if action.kind.is_computation]
    forwards = next(at for at, action in enumerate(computations) if action.kind is not Kind.FORWARD)
    begins = next(mark.operation for mark in memory.timeline.phases if mark.phase == "backward")
    columns = [CATEGORIES.index(name) for name in _HELD]
    at = max(int((memory.timeline.operations <= begins).sum()) - 1, 0)
    return float(memory.timeline.live[at, columns].sum()) / forwards
