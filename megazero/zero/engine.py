"""The engine: wires layout, shards, gathering, reduction, update and publishing around a module, for every ZeRO stage.

A step is: `begin_step`, then for every micro-batch forward and `backward` (their gathers and reductions run beside
them), then `finish_reductions`, `local_norms` and `update`, which `step.py` puts together.  Which stage it is shows
nowhere but in the plan.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megazero.comm.interface import Communicator, Scratch
from megazero.comm.mesh import Mesh
from megazero.config.engine_sections import ZeroConfig
from megazero.memory.address_book import ArenaStatistics
from megazero.memory.ledger_interface import AnyLedger, NullLedger
from megazero.optim.inner import InnerOptimizer, StepInputs
from megazero.parallel.gradient_place import Taken, attach_place, detach_place
from megazero.parallel.param_spec import StateFragment, named_specs
from megazero.parallel.topology import ENDS
from megazero.zero.frames import Frames, on_gradient
from megazero.zero.gather import ParameterGather
from megazero.zero.guard import give_handle, take_handle
from megazero.zero.layout import (
    FlatLayout,
    LayoutRules,
    Placed,
    Unit,
    build_layout,
    choose_persistent,
)
from megazero.zero.module_apply import gather_around_apply, leave_apply
from megazero.zero.plan import ModelStateBytes, Placement, ZeroPlan
from megazero.zero.publish import ParameterPublisher
from megazero.zero.reduce import GradientReducer
from megazero.zero.shards import Contents, FirstValue, Shards, owned_state, value_of_parameter, wanted_state
from megazero.zero.sums import GradientSums
from megazero.zero.update import LocalNorms, Piece, ShardUpdate


class ModelUnit(NamedTuple):
    """A unit of the model: its parameters by name, and the modules whose forwards read them.

    part: which of several parts of the model, each with backwards of its own, it belongs to (a pipeline's chunks).
    """

    name: str
    parameters: tuple[str, ...]
    consumers: tuple[nn.Module, ...]
    part: int = 0


@dataclass(frozen=True)
class EngineSettings:
    """The ZeRO section, the optimizer, where first values come from (the parameters, unless told), and the ledger.

    parameter_names: of the whole model, where ranks hold different parts of it, so that all mean the same by an index.
    """

    zero: ZeroConfig
    optimizer: InnerOptimizer
    first_value: FirstValue = value_of_parameter
    ledger: AnyLedger = field(default_factory=NullLedger)
    parameter_names: tuple[str, ...] = ()

    def contents(self, parameters: Mapping[str, nn.Parameter]) -> Contents:
        """What the shards of these parameters are made from."""
        in_arena = self.zero.contiguous_gradients
        return Contents(parameters, self.first_value, self.optimizer.moments, self.ledger, gradients_in_arena=in_arena)


def plan_layout(
    model: nn.Module, units: Sequence[ModelUnit], partitions: int, plan: ZeroPlan, settings: EngineSettings
) -> FlatLayout:
    """The flat layout of a model's parameters over `partitions` ranks."""
    zero = settings.zero
    specs = [spec for spec, _ in named_specs(model)]
    persistent = {spec.name for spec in specs}
    if plan.parameter.placement is Placement.PARTITIONED:
        persistent = choose_persistent(
            specs, smaller_than=zero.param_persistence_threshold, total=zero.model_persistence_threshold
        )
    placed = [
        Placed(spec, parameter.dtype, spec.name not in persistent, settings.optimizer.group_of(spec, parameter))
        for spec, parameter in named_specs(model)
    ]
    plain = [Unit(unit.name, unit.parameters) for unit in units]
    bucket_numel = min(zero.reduce_bucket_size, zero.allgather_bucket_size)
    return build_layout(plain, placed, LayoutRules(partitions, bucket_numel))


class Engine:
    """ZeRO data parallelism around `model`, whose parameters become views of the engine's flat tensors."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ModelUnit],
        plan: ZeroPlan,
        *,
        mesh: Mesh,
        buffers: Scratch,
        settings: EngineSettings,
    ) -> None:
        self.model = model
        self.plan = plan
        self.settings = settings
        self.gradient_scale = 1.0
        """What kept gradients are multiplied with where they are shown to a user; the caller of `update` knows it."""
        self.has_gradients = False
        """Whether the gradients of a whole step are kept: from its last backward until the next step begins."""
        self._unfinished: set[int] = set()  # parts whose last micro-batch has not come
        self._mesh = mesh
        self.world = mesh.world  # all ranks of the job
        axis = mesh.axis("dp")
        self._parameters = dict(model.named_parameters())
        self._coordinates = {axis: mesh.coordinate(axis) for axis in ("tp", ENDS)}
        self.layout = plan_layout(model, units, axis.size, plan, settings)
        self._units_of = _units_by_part(units)
        self._slots = {slot.spec.name: (section, slot) for section in self.layout.sections for slot in section.slots}
        zero, contents = settings.zero, settings.contents(self._parameters)
        self._shards = Shards(plan, self.layout, axis.rank, contents=contents)
        self._reducer = GradientReducer(self._shards, axis, buffers, self._parameters, zero)
        self._sums = GradientSums(self._shards, mesh.axis, buffers)
        _give_handles(self._parameters, self)
        self._hooks = on_gradient(self._parameters, self._gradient_ready)
        _attach_places(self._parameters, self.layout, self._reducer)
        self._publisher = ParameterPublisher(self._shards, mesh.gathering, by_gather=zero.allgather_partitions)
        self._gather = ParameterGather(self._shards, mesh.gathering, self._parameters, zero)
        self._frames = Frames(model, _units_by_consumer(units), self._gather, self._publisher)
        self._update = ShardUpdate(
            self._shards,
            self._publisher,
            settings.optimizer,
            sub_group_numel=zero.sub_group_size,
            counted_at=self._coordinates,
            names=settings.parameter_names,
        )
        if zero.override_module_apply and self._gather.is_needed:
            for module in model.modules():
                gather_around_apply(module)

    def begin_step(self) -> None:
        """Nothing is accumulated any more."""
        self.has_gradients = False
        self._unfinished = set(self._units_of)
        self._reducer.begin_step()

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Backward of one micro-batch; `is_last` marks the accumulation boundary.

        Gradients are summed over micro-batches and ranks, so `loss` must hold whatever makes that sum the average.
        """
        self.begin_backward(is_last=is_last)
        torch.autograd.backward(loss)
        self.end_backward()

    def begin_backward(self, *, is_last: bool, part: int = 0) -> None:
        """Autograd is about to walk the graph of one micro-batch, and gives gradients to parameters of one part."""
        units = self._units_of.get(part, set())
        buckets = [b for b in self.layout.trainable_buckets if self.layout.sections[b.section].unit in units]
        self._reducer.begin_micro_batch(buckets, is_last=is_last)
        self._unfinished -= {part} if is_last else set()

    def end_backward(self, *, ends_pass: bool = True) -> None:
        """Autograd is done; ends_pass: no forward waits for its backward."""
        self._reducer.end_micro_batch()
        self.end_walk(ends_pass=ends_pass)
        self.has_gradients = self._sums.are_due = not self._unfinished

    def end_walk(self, *, ends_pass: bool) -> None:
        """Autograd has walked a graph, whether or not it has given gradients to parameters."""
        if ends_pass:
            self._gather.end_pass(with_backward=True)
        else:
            self._gather.end_backward()

    def keep(self, part: int) -> None:
        """Gathered parameters of a part stay, as far as memory's limit allows, until `let_go`."""
        self._gather.keep(self._units_of.get(part, set()))

    def let_go(self, part: int) -> None:
        """They don't stay any longer than each use needs them."""
        self._gather.let_go(self._units_of.get(part, set()))

    def finish_reductions(self) -> None:
        """Return when every gradient this rank keeps is reduced."""
        self._reducer.finish()
        self._sums.apply()

    def abandon_step(self) -> None:
        """Forward or backward has failed: what it has begun comes to an end, and counts for nothing."""
        self._reducer.abandon()
        self._frames.abandon()

    @property
    def data_parallel(self) -> Communicator:
        """The axis over which state is partitioned."""
        return self._mesh.axis("dp")

    @property
    def predivisor(self) -> float:
        """What gradients have been divided by on their way: norms and the update's factor make up for it."""
        return self._reducer.predivisor

    def local_norms(self) -> LocalNorms:
        """This rank's share of the gradient norm and of the overflow check, of gradients as they are kept."""
        return self._update.local_norms(self._reducer.scratch)

    def update(self, inputs: StepInputs) -> None:
        """Optimizer step on the owned ranges, and publishing, which ends just before each unit's next use."""
        self._gather.check_unpinned("an optimizer step")
        self._gather.release_all()
        self._publisher.ensure_all()  # of units that no forward has used since the step before
        self._update.apply(inputs, self._reducer.scratch)

    def release(self) -> None:
        """Let go of gathered parameters that nobody holds."""
        self._gather.release_all()

    def ensure_parameters(self) -> None:
        """Return when every working parameter that is kept whole may be read outside a forward."""
        self._publisher.ensure_all()

    @property
    def largest_buffer_bytes(self) -> int:
        """Bytes that constant-size buffers must hold: a bucket on the wire, one update's gradients, one norm's."""
        wire = self.layout.max_bucket_numel * max(self.plan.gradient_wire.itemsize, self.plan.gradient.itemsize)
        return max(wire, self._update.largest_buffer_bytes)

    @property
    def gathered_numel(self) -> tuple[int, int]:
        """Elements of partitioned parameters that are gathered now, and that were at the most."""
        return self._gather.memory.live_numel, self._gather.memory.peak_live_numel

    def parameter_name(self, index: int) -> str:
        """The parameter that `LocalNorms.first_overflow` means, on whichever rank it is."""
        return self._update.parameter_names[index]

    @property
    def optimizer_step(self) -> Tensor:
        """Number of optimizer steps taken, float32, no dimensions."""
        return self._shards.optimizer_step

    def model_state_bytes(self) -> ModelStateBytes:
        """Bytes of model states this rank really holds."""
        return self._shards.model_state_bytes(kept_by_optimizer=self._update.optimizer_bytes())

    @property
    def gradient_arenas(self) -> dict[str, ArenaStatistics]:
        """With contiguous gradients: of those that are "kept", and of "buckets" where those are leased."""
        return self._reducer.arenas

    def owned_state(self) -> Iterator[StateFragment]:
        """What this rank saves: over all ranks, every element of every parameter and kind exactly once."""
        yield from chain(owned_state(self._shards, self._coordinates), self._update.kept_by_optimizer(is_saved=True))

    def wanted_state(self) -> Iterator[StateFragment]:
        """What this rank must be given to go on from a checkpoint; follow with `state_loaded`."""
        yield from chain(wanted_state(self._shards), self._update.kept_by_optimizer(is_saved=False))

    def state_loaded(self, *, weights_only: bool = False) -> None:
        """Make working parameters follow what has been written into `wanted_state`.

        With weights_only (no moments), master weights then lose what the working dtype cannot hold, if the
        configuration wants to load from such weights.
        """
        self._gather.release_all()  # copies of the old values
        for bucket in self.layout.trainable_buckets:
            self._shards.copy_master_to_working(bucket)
        if weights_only and not self.settings.zero.load_from_fp32_weights:
            self._shards.copy_working_to_master()
        self._update.publish_all()
        self.ensure_parameters()

    def pieces(self, name: str, kind: str) -> Iterator[Piece]:
        """What this rank owns of a parameter's "master", "gradient" or optimizer state; nothing of a frozen one."""
        return self._update.pieces(name, kind)

    def republish(self, name: str) -> None:
        """Bring working parameters after their master weights have been written to; a collective call."""
        self._gather.check_unpinned("setting master weights")
        section, _ = self._slots[name]
        self._gather.release_all()
        for bucket in section.buckets:
            self._shards.copy_master_to_working(bucket)
            self._publisher.publish(bucket)
        self._publisher.ensure(section.unit)

    def touched(self, name: str, call: str) -> None:
        """A partitioned parameter is about to be read: gather it if this is the place, or raise UsageError."""
        self._frames.touched(name, call)

    def hold(self, names: Iterable[str], why: str) -> None:
        """Make parameters whole on every rank until `hand_back`; a collective call."""
        for name in names:
            unit = self._gather.unit_of(name)
            if unit is None:
                self._publisher.ensure(self._slots[name][0].unit)
            else:
                self._gather.hold(unit, why)

    def hand_back(self, names: Iterable[str], *, modifier_rank: int | None) -> None:
        """Let parameters go; with modifier_rank every rank keeps, master weights too, what they are on that rank."""
        for name in names:
            unit = self._gather.unit_of(name)
            if modifier_rank is not None:
                self._take_over(name, modifier_rank)
            if unit is not None:
                self._gather.unpin(unit)

    def register_external(self, module: nn.Module, name: str) -> None:
        """`module`'s forward reads parameter `name` too."""
        self._frames.register(module, self._slots[name][0].unit)

    def close(self) -> None:
        """Take the hooks off the module; partitioned parameters stay without values, and guarded."""
        self.ensure_parameters()
        self._frames.close()
        for module in self.model.modules():
            leave_apply(module)
        for handle in self._hooks:
            handle.remove()
        for name, parameter in self._parameters.items():
            _take_gradient(parameter)
            if self._gather.unit_of(name) is None:
                take_handle(parameter)

    def _take_over(self, name: str, source: int) -> None:
        """The parameter's values on data-parallel rank `source` become everyone's."""
        section, slot = self._slots[name]
        self._mesh.gathering.broadcast(self._shards.flat(section)[slot.start : slot.stop], source).wait()
        self._shards.take_over(section, name)

    def _gradient_ready(self, name: str) -> None:
        gradient = self._parameters[name].grad
        if gradient is not None:
            self.settings.ledger.tag(gradient, "gradients")
        self._reducer.gradient_ready(name)
        self._gather.gradient_ready(name)


class _Place(NamedTuple):
    """Where one parameter's gradient is written."""

    reducer: GradientReducer
    name: str

    def take(self) -> Taken | None:
        return self.reducer.place(self.name)


def _give_handles(parameters: Mapping[str, nn.Parameter], engine: Engine) -> None:
    for name, parameter in parameters.items():
        give_handle(parameter, name, engine)


def _attach_places(parameters: Mapping[str, nn.Parameter], layout: FlatLayout, reducer: GradientReducer) -> None:
    slots = [slot for section in layout.sections if section.trainable for slot in section.slots]
    for spec in (slot.spec for slot in slots if slot.spec.writes_gradient):
        attach_place(parameters[spec.name], _Place(reducer, spec.name))


def _take_gradient(parameter: nn.Parameter) -> None:
    """The parameter's gradient is nobody's business any more."""
    detach_place(parameter)
    if parameter.requires_grad:
        parameter.grad = None
        parameter.grad_dtype = parameter.dtype


def _units_by_part(units: Sequence[ModelUnit]) -> dict[int, set[str]]:
    parts: dict[int, set[str]] = {}
    for unit in units:
        parts.setdefault(unit.part, set()).add(unit.name)
    return parts


def _units_by_consumer(units: Sequence[ModelUnit]) -> dict[nn.Module, list[str]]:
    consumers: dict[nn.Module, list[str]] = {}
    for unit in units:
        for module in unit.consumers:
            consumers.setdefault(module, []).append(unit.name)
    return consumers
