"""The engine: wires layout, shards, gathering, reduction, update and publishing around a module, for every ZeRO stage.

A step is: `begin_step`, then for every micro-batch forward and `backward` (their gathers and reductions run beside
them), then `finish_reductions`, `local_norms` and `update`, which `step.py` puts together.  Which stage it is shows
nowhere but in the plan.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megazero.comm.interface import FILE, HOST, Communicator
from megazero.comm.mesh import Mesh
from megazero.comm.wires.quantized import EncodedGather
from megazero.config.engine_sections import UNLIMITED, ZeroConfig
from megazero.config.optimizers import EIGHT_BIT_BLOCK
from megazero.errors import Problem, UsageError, raise_problems
from megazero.memory.address_book import ArenaStatistics
from megazero.memory.block_file import AlignedMemory, BlockIO
from megazero.memory.file_states import FileStates, file_bandwidth
from megazero.memory.homes import HostHome
from megazero.memory.lease import Scratch
from megazero.memory.ledger_interface import AnyLedger, NullLedger
from megazero.optim.inner import InnerOptimizer, MeasuringOptimizer, StepInputs
from megazero.parallel.gradient_slot import attach_gradient_slot, detach_gradient_slot
from megazero.parallel.param_spec import ParamSpec, StateFragment, Unit, named_specs
from megazero.parallel.topology import ENDS, REPLICAS
from megazero.timers import Timers
from megazero.zero.gradients.gradient_guard import GradientGuards
from megazero.zero.gradients.presence import NOTHING, GradientPresence
from megazero.zero.gradients.reduce import GradientReducer
from megazero.zero.gradients.sums import GradientSums
from megazero.zero.home_traffic import HomeTraffic, home_traffic
from megazero.zero.late_update import LateUpdate
from megazero.zero.layout import (
    FlatLayout,
    LayoutRules,
    Slot,
    build_layout,
    choose_persistent,
    gather_limit,
    join_small_units,
    joined_limit,
    reduction_limit,
)
from megazero.zero.offloaded import OffloadedStates, StateKind
from megazero.zero.parameters.frames import Frames, on_gradient
from megazero.zero.parameters.gather import ParameterGather
from megazero.zero.parameters.gathered import raise_changes
from megazero.zero.parameters.guard import attach_handle, detach_handle
from megazero.zero.parameters.module_apply import gather_around_apply, restore_apply
from megazero.zero.parameters.publish import ParameterPublisher
from megazero.zero.parameters.written import WrittenParameters
from megazero.zero.plan import Home, Lifetime, ModelStateBytes, OptimizerShape, Placement, ZeroPlan, wires
from megazero.zero.shards import FirstValue, Shards, value_of_parameter
from megazero.zero.update import WEIGHTS, LocalNorms, OptimizerNumbers, Piece, ShardUpdate

# The most elements of units that are laid out together where a user's modules are the units: 8 MiB in fp32.
_JOINED_NUMEL = 1 << 21
# The least number of equal buckets of a model whose optimizer states have several homes.
_MIXED_BUCKETS = 16


@dataclass(frozen=True)
class EngineSettings:
    """The ZeRO section, the optimizer, the source of first values (by default the parameters), and the ledger.

    parameter_names: of the whole model, where ranks have different parts of it, so that an index is the same on all.
    checks_finite: True if a gradient that is not finite prevents the update in every number format, not in fp16 alone.
    leaves_unused: True if a step leaves the parameters alone of which no rank has a gradient; False: their gradient
    counts as zero, by which moments and weights decay.
    serves_user_code: True if a program of the user's trains the model.  It may read and write `.grad`, which holds no
    whole gradient in stages 1 to 3, write to the parameters, and run other modules on one rank than on another.
    timers: for gathers, reductions, updates and publishing.
    """

    zero: ZeroConfig
    optimizer: InnerOptimizer
    first_value: FirstValue = value_of_parameter
    ledger: AnyLedger = field(default_factory=NullLedger)
    parameter_names: tuple[str, ...] = ()
    checks_finite: bool = False
    leaves_unused: bool = False
    serves_user_code: bool = False
    timers: Timers = field(default_factory=lambda: Timers(torch.device("cpu")))


class GradientSoFar(NamedTuple):
    """This rank's part of a parameter's gradient in the middle of a step.

    pieces: parts whose sum over the data-parallel ranks, and over the axes `summed_over`, is the gradient times
    `divisor`, before the factor that makes an average of it.
    """

    pieces: list[Piece]
    divisor: float
    summed_over: tuple[str, ...]


def plan_layout(
    model: nn.Module, units: Sequence[Unit], partitions: int, plan: ZeroPlan, settings: EngineSettings
) -> FlatLayout:
    """Build the flat layout of a model's parameters over `partitions` ranks."""
    zero = settings.zero
    specs = [spec for spec, _ in named_specs(model)]
    persistent = {spec.name for spec in specs}
    if plan.parameter.placement is Placement.PARTITIONED:
        persistent = choose_persistent(
            specs, smaller_than=zero.param_persistence_threshold, total=zero.model_persistence_threshold
        )
    slots = [
        Slot(
            replace(
                spec, arrives_alone=spec.arrives_alone or (settings.serves_user_code and spec.accumulates_in_place)
            ),
            parameter.dtype,
            spec.name not in persistent,
            settings.optimizer.group_of(spec, parameter),
        )
        for spec, parameter in named_specs(model)
    ]
    block = 1 if plan.frozen is None else plan.frozen.block
    trained = EIGHT_BIT_BLOCK if settings.optimizer.code_values else 1
    limits = message_limits(zero, plan, partitions)
    bucket_numel = min(limits)
    if plan.mixes_homes:  # of whole buckets: there are so many of them that the shares are met
        numel = sum(slot.spec.numel for slot in slots if slot.spec.trainable)
        bucket_numel = min(bucket_numel, numel // _MIXED_BUCKETS)
    rules = LayoutRules(
        partitions,
        bucket_numel=bucket_numel,
        frozen_block=block,
        trained_block=trained,
        reduced_numel=limits.reduced,
    )
    return build_layout(units, slots, rules)


class MessageLimits(NamedTuple):
    """The most elements that one reduction moves, and one gather; a bucket has as many as the smaller one."""

    reduced: int
    gathered: int


def message_limits(zero: ZeroConfig, plan: ZeroPlan, partitions: int) -> MessageLimits:
    """Return the limits of messages over `partitions` ranks."""
    reduced = reduction_limit(partitions, zero.reduce_bucket_size)
    publishes = plan.optimizer.placement is Placement.PARTITIONED and zero.allgather_partitions
    if not publishes and plan.parameter.placement is Placement.REPLICATED:  # nothing is gathered
        return MessageLimits(reduced, reduced)
    return MessageLimits(reduced, gather_limit(partitions, zero.reduce_bucket_size, zero.allgather_bucket_size))


class Engine:
    """The engine of ZeRO data parallelism around `model`, whose parameters become views of its flat tensors."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
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
        """The factor by which gradients are multiplied where a user reads them; the caller of `update` sets it."""
        self.has_gradients = False
        """True while the gradients of a whole step exist: from its last backward until the next step begins."""
        self.num_weight_changes = 0
        """The number of times that weights have changed, by which what is computed from them is found out of date."""
        self.before_stray_gradient: Callable[[str], None] | None = None
        """Called with the name of a parameter that has got a gradient while no micro-batch's is expected."""
        self.before_leaf: Callable[[], None] | None = None
        """Called where backward enters a leaf module, while no micro-batch's gradients are expected but some come."""
        self._are_averages = False  # the gradients, which are sums until user code reads them
        self._has_accumulated = False  # gradients since the step began
        self._as_gathered: dict[str, Tensor] = {}  # bytes of parameters that a block reads, where that is checked
        self._unfinished: set[int] = set()  # parts whose last backward has not begun
        self.mesh = mesh
        self._flight = mesh.meter.flight
        self.world = mesh.world  # all ranks of the job
        axis = mesh.partition
        self._parameters = dict(model.named_parameters())
        self._coordinates = {axis: mesh.coordinate(axis) for axis in ("tp", ENDS, REPLICAS)}
        self.units = tuple(units)
        limits = message_limits(settings.zero, plan, axis.size)
        if plan.parameter.placement is Placement.REPLICATED:
            numel = {name: parameter.numel() for name, parameter in self._parameters.items()}
            most = max(_JOINED_NUMEL if settings.serves_user_code else 0, joined_limit(axis.size))
            units = join_small_units(units, numel, min(most, max(limits)))
        self.layout = plan_layout(model, units, axis.size, plan, settings)
        self._units_of: dict[int, set[str]] = {}  # by part
        consumers: dict[nn.Module, list[str]] = {}
        for unit in units:
            self._units_of.setdefault(unit.part, set()).add(unit.name)
            for module in unit.consumers:
                consumers.setdefault(module, []).append(unit.name)
        self._slots = {slot.spec.name: (section, slot) for section in self.layout.sections for slot in section.slots}
        zero = settings.zero
        self._host = HostHome(
            mesh.device,
            is_pinned=zero.offload_pin_memory,
            ledger=settings.ledger,
            record=partial(mesh.meter.record, HOST),
        )
        self._offloaded = OffloadedStates(self._host, settings.ledger)
        self._files = self._make_files()
        self._late = LateUpdate()
        self._parameter_files = self._make_parameter_files()
        self._shards = Shards(
            plan,
            self.layout,
            axis.rank,
            self._parameters,
            first_value=settings.first_value,
            moments=settings.optimizer.moments,
            code_values=settings.optimizer.code_values,
            kinds_in_files=self._kinds_in_files,
            ledger=settings.ledger,
            gradients_in_arena=zero.contiguous_gradients,
            host=self._host,
            files=self._files,
            parameter_files=self._parameter_files,
            sub_group_numel=zero.sub_group_size or UNLIMITED,
            late=self._late,
            check_back=self._offloaded.check_back,
        )
        self._reducer = GradientReducer(
            self._shards,
            axis,
            buffers,
            self._parameters,
            zero,
            num_summed=self.data_parallel.size,
            timers=settings.timers,
            in_leaves=self._trainable_in([unit.name for unit in units if unit.is_leaf]),
        )
        self._sums = GradientSums(self._shards, mesh, buffers)
        for name, (section, slot) in self._slots.items():
            attach_handle(self._parameters[name], name, self)
            if section.trainable and slot.spec.writes_gradient:
                attach_gradient_slot(self._parameters[name], partial(self._reducer.gradient_slot, name))
        self._hooks = on_gradient(self._parameters, self._gradient_ready)
        self._guards = self._guard_gradients() if settings.serves_user_code else None
        self._publisher = ParameterPublisher(
            self._shards,
            mesh.gathering,
            by_gather=zero.allgather_partitions,
            most_gathered=limits.gathered,
            timers=settings.timers,
        )
        self._gather = ParameterGather(
            self._shards,
            mesh.weights,
            self._parameters,
            zero,
            most_gathered=limits.gathered,
            secondary=mesh.secondary,
            exact=mesh.gathering,
            frozen=None if plan.frozen is None else EncodedGather(mesh.gathering, plan.frozen, buffers),
            joins_units=plan.frozen is None,
            ranks_may_differ=settings.serves_user_code,
            take_updated=self._publisher.take_updated,
            come_to=self._reducer.come_to,
            timers=settings.timers,
        )
        leaves = [module for unit in units if unit.is_leaf for module in unit.consumers]
        self._frames = Frames(
            model, consumers, leaves, self._gather, self._publisher, self._flight, enter_leaf=self._enter_leaf
        )
        self._update = ShardUpdate(
            self._shards,
            self._publisher,
            settings.optimizer,
            reads_ahead=zero.offload_pipeline_read,
            num_at_once=zero.delayed_parameter_update_start if zero.delayed_parameter_update else None,
            counted_at=self._coordinates,
            mesh=mesh,
            names=settings.parameter_names,
            timers=settings.timers,
        )
        self._host.reserve(max(self._update.largest_buffer_bytes(on_device=False), self._largest_wire_bytes))
        self._presence = GradientPresence(
            self._update.parameter_names, self._trainable_names(), self._reducer.present, mesh.device
        )
        writable = self._parameters if settings.serves_user_code else {}
        self.written = WrittenParameters(model, writable, self._shards, mesh)
        """The changes that the user has made to the parameters since the last step."""
        self.stopped = torch.zeros((), dtype=torch.float64, device=mesh.device)
        """1 from the first step whose figures were not finite, where that ends the training: later ones change nothing,
        because a GPU may have begun them before the host reads that step's figures."""
        if zero.override_module_apply and self._gather.is_needed:
            for module in model.modules():
                gather_around_apply(module)

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self.has_gradients = self._sums.are_due = False
        self._are_averages = self._has_accumulated = False
        if self._guards is not None:
            self._guards.forget()
        self._unfinished = set(self._units_of)
        self._reducer.begin_step()

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Run the backward of one micro-batch; `is_last` marks the accumulation boundary.

        Gradients are summed over micro-batches and ranks, so `loss` must be scaled so that this sum is the average.
        """
        self.begin_backward(is_last=is_last)
        torch.autograd.backward(loss)
        self.end_backward()

    def begin_backward(self, *, is_last: bool, part: int = 0) -> None:
        """Expect the gradients of one part's parameters from the micro-batch whose graph autograd walks next."""
        self._offloaded.check_back("backward", (StateKind.PARTITIONS, StateKind.GRADIENTS))
        self._flight.activity = "backward"
        if self._guards is not None:
            self._guards.remove()
        units = self._units_of.get(part, set())
        sections = self.layout.sections
        due = [reduction for reduction in self.layout.reductions if sections[reduction.section].unit in units]
        self._reducer.begin_micro_batch(due, is_last=is_last)
        self._unfinished -= {part} if is_last else set()

    @property
    def may_find_unused(self) -> bool:
        """True if a parameter had no gradient in the last pass."""
        return self._reducer.may_find_unused

    def find_unused(self) -> None:
        """Find parameters that get no gradient in the pass whose graph autograd walks, so that none is awaited.

        Called before the first gradient of the pass, where the graph is the outermost one.
        """
        self._reducer.find_unused(self._gather.trainable_by_unit)

    def end_backward(self, *, ends_pass: bool = True) -> None:
        """Launch the reductions that are left; ends_pass: no other forward waits for its backward."""
        self._reducer.end_micro_batch()
        self.end_walk(ends_pass=ends_pass)
        self.has_gradients = self._sums.are_due = not self._unfinished
        self._has_accumulated = True
        if self._guards is None:
            return
        if self.has_gradients and self._are_whole:
            self.finish_reductions()  # on all ranks at this place, whether or not they read gradients before the step
        self.guard_gradients()

    def guard_gradients(self) -> None:
        """Let guards stand in `.grad` between two passes, wherever a pass has put something else."""
        if self._guards is not None and self._has_accumulated:
            self._guards.put(at_end=self.has_gradients)

    def gradient_touched(self, name: str, call: str) -> None:
        """Turn the sums into averages where every rank has whole gradients; raise UsageError elsewhere."""
        if self._are_averages:
            return
        if self.has_whole_gradients:
            self._average_gradients()
            return
        given = f"{call} of the .grad of parameter {name}"
        legal = "megazero.zero.safe_get_full_grad(parameter), safe_set_full_grad(parameter, value)"
        if self._are_whole:
            rule = "until a step's last backward a rank has the gradients of its own samples only"
            raise UsageError(Problem(given, rule, f"{legal}; .grad after the step's last backward"))
        rule = "no rank has a whole gradient in ZeRO stages 1 to 3"
        raise UsageError(Problem(given, rule, f"{legal}; gradient_clipping in the configuration for clip_grad_norm_"))

    def zero_gradient(self, name: str) -> None:
        """Zero a parameter's gradient if the step is complete; before that, micro-batches go on adding up."""
        if self.has_gradients:
            self.finish_reductions()
            for piece in self.pieces(name, "gradient"):
                piece.tensor.detach().zero_()

    def take_written_gradients(self) -> None:
        """Make what user code has put into `.grad` since the step's last backward the gradients of the step.

        None means that there is no gradient; so do zeros for a parameter that no pass has made one of, since user code
        finds zeros there.  Raises UsageError for a tensor where no rank has a whole gradient.
        """
        if self._guards is None:
            return
        removed, written = self._guards.changes()
        for name in written:
            self.gradient_touched(name, "setting")
        for name in removed:
            self.zero_gradient(name)
            self._reducer.present.discard(name)
        for name, value in written.items():
            self._guards.whole[name].detach().copy_(value.detach())
        if self._are_averages:
            absent = self._guards.whole.keys() - self._reducer.present - set(removed)
            self._reducer.present.update(name for name in absent if bool(self._guards.whole[name].any()))

    @property
    def has_whole_gradients(self) -> bool:
        """True if every rank has the gradients of a whole step: the averages, once user code reads them."""
        return self._are_whole and self.has_gradients

    @property
    def accumulates_in_grad(self) -> bool:
        """True if autograd would add a new gradient to those of the step, since they stand in `.grad`."""
        return self.plan.gradient.lifetime is Lifetime.LOOSE or self.has_whole_gradients

    @property
    def _are_whole(self) -> bool:
        return self.plan.gradient.placement is Placement.REPLICATED

    def _guard_gradients(self) -> GradientGuards:
        """Make the guards of all gradients that autograd computes."""
        slots = (slot for section, slot in self._slots.values() if section.trainable)
        names = [slot.spec.name for slot in slots if not slot.spec.writes_gradient]
        parameters = {name: self._parameters[name] for name in names}
        whole = {name: self._shards.whole_gradient_of(name) for name in names} if self._are_whole else {}
        return GradientGuards(parameters, self, whole=whole)

    def _average_gradients(self) -> None:
        self.finish_reductions()
        self._shards.scale_gradients(self.gradient_scale)
        self.gradient_scale = 1.0
        self._are_averages = True

    def end_walk(self, *, ends_pass: bool) -> None:
        """Release the units that a finished walk through a graph has used, whether or not it made gradients."""
        self._reducer.forget_unused()
        if ends_pass:
            self._gather.end_pass(with_backward=True)
        else:
            self._gather.end_backward()

    def retain_part(self, part: int) -> None:
        """Retain a part's gathered parameters between uses, up to the limit of memory, until `release_part`."""
        self._gather.retain(self._units_of.get(part, set()))

    def release_part(self, part: int) -> None:
        """Release a part's gathered parameters, now and after each use from here on."""
        self._gather.stop_retaining(self._units_of.get(part, set()))

    def finish_reductions(self) -> None:
        """Wait until every gradient that this rank stores is reduced."""
        self._reducer.finish()
        self._sums.apply()

    def forget_gradients(self) -> None:
        """Forget the step's gradients, between two passes; what is being reduced is waited for."""
        self._reducer.reset()

    def reset_step(self) -> None:
        """Recover from a failed forward or backward: finish its collectives, and forget its gradients and uses."""
        self._reducer.reset()
        self._frames.reset()

    @property
    def refuses_updates(self) -> bool:
        """True if a step whose figures are not finite changes neither weights nor moments.

        On a GPU a torch optimizer that the host keeps from stepping would make it wait in every step: fp16 pays that.
        """
        is_free = not (self.settings.optimizer.skips_on_host and self.stopped.is_cuda)
        return self.plan.may_overflow or (self.settings.checks_finite and is_free)

    @property
    def data_parallel(self) -> Communicator:
        """The ranks that train side by side on samples of their own."""
        return self.mesh.axis("dp")

    @property
    def partition(self) -> Communicator:
        """The ranks over which state is partitioned: all data-parallel ones, or a shard group of them."""
        return self.mesh.partition

    @property
    def predivisor(self) -> float:
        """The number that reduction divides gradients by: norms and the update's factor make up for it."""
        return self._reducer.predivisor

    def local_norms(self) -> LocalNorms:
        """Return this rank's share of the gradient norm and of the overflow check, of gradients as they are stored."""
        self._update.finish_copies()
        return self._update.local_norms(self._reducer.scratch)

    def present_gradients(self) -> Tensor | None:
        """Return flags of the parameters of which this rank has a gradient in the step, float64 [parameters].

        None where parameters without a gradient are updated too.
        """
        return self._presence.flags() if self.settings.leaves_unused else None

    def absent_gradients(self, counts: Tensor) -> dict[str, Tensor]:
        """Return flags, 1 for a parameter that no rank has a gradient of, by those that this rank has none of.

        counts: the sums of all ranks' `present_gradients`.
        """
        return self._presence.absent(counts)

    def check_may_update(self) -> None:
        """Raise UsageError while states are away from the device, of which a step needs each kind."""
        self._offloaded.check_back("an optimizer step", tuple(StateKind))

    def update(self, inputs: StepInputs, absent: Mapping[str, Tensor] = NOTHING) -> None:
        """Take an optimizer step on the owned ranges and publish them, which ends just before each unit's next use.

        absent: `absent_gradients`.
        """
        self.check_may_update()
        self.check_updated("an optimizer step")
        self._gather.check_unpinned("an optimizer step")
        self._gather.release_all()
        self._publisher.ensure_all()  # of units that no forward has used since the step before
        self._update.apply(inputs, self._reducer.scratch, absent)
        self.num_weight_changes += 1

    @property
    def is_partly_updated(self) -> bool:
        """True after an update that an exception has ended, until state is loaded."""
        return self._update.is_partial

    def check_updated(self, call: str) -> None:
        """Raise UsageError for a call that needs the state of a step, after an update that an exception has ended."""
        if self.is_partly_updated:
            rule = "an exception, such as Ctrl-C, has ended an update: some parameters are a step ahead of others"
            legal = "engine.load_checkpoint(FOLDER) first, or load_state_dict of the engine and of its optimizer"
            raise UsageError(Problem(call, rule, legal))

    def publish_late(self) -> None:
        """Let all parameters have what an update has made that runs beside the next step; a collective call.

        Parameters are a step behind else, between two steps of which each is updated late.
        """
        if self._late.unpublished:
            self._gather.release_all()
            self._publisher.ensure_all()
            self._update.publish_late()

    def release_all(self) -> None:
        """Release all gathered parameters that are not pinned."""
        self._gather.release_all()

    def ensure_parameters(self) -> None:
        """Wait until every working parameter that is not partitioned may be read outside a forward."""
        self._publisher.ensure_all()

    @property
    def largest_buffer_bytes(self) -> int:
        """The bytes that constant-size buffers must hold: a reduction's, an update's gradients, a norm's."""
        return max(self._largest_wire_bytes, self._update.largest_buffer_bytes(on_device=True))

    @property
    def _largest_wire_bytes(self) -> int:
        """The bytes of the largest reduction on the wire."""
        itemsize = max(self.plan.gradient_wire.itemsize, self.plan.gradient.itemsize)
        if self.settings.zero.zero_quantized_gradients:  # sums of decoded numbers are in fp32 at least
            itemsize = max(itemsize, torch.float32.itemsize)
        return max(self.layout.max_reduced_numel * itemsize, self._largest_frozen_bytes)

    @property
    def _largest_frozen_bytes(self) -> int:
        """The bytes of the largest frozen bucket in the buffers of a wire that has some for gathers; else 0."""
        travel, inside, largest = wires(self.settings.zero), self.mesh.topology.inside, 0
        codecs = [codec for codec in (travel.weights, self.plan.frozen) if codec is not None]
        for section in self.layout.sections:
            if section.trainable or not section.partitioned:
                continue
            for bucket in section.buckets:
                numel = bucket.numel // bucket.partitions
                sizes = [bucket.partitions * codec.encoded_bytes(numel) for codec in codecs]
                if inside > 1:  # gathers may take two hops, of which the first is of one rank a node
                    sizes.append(bucket.partitions // inside * numel * section.dtype.itemsize)
                largest = max(largest, *sizes, 0)
        return largest

    @property
    def gathered_numel(self) -> tuple[int, int]:
        """The elements of partitioned parameters that are gathered now, and that were at the most."""
        return self._gather.memory.live_numel, self._gather.memory.peak_live_numel

    def parameter_name(self, index: int) -> str:
        """Return the parameter to which `LocalNorms.first_overflow` refers, on whichever rank it is; "" for none."""
        names = self._update.parameter_names
        return names[index] if index < len(names) else ""

    @property
    def parameter_names(self) -> Sequence[str]:
        """The trained parameters, of the whole model where ranks have different parts of it; the same on every rank."""
        return self._update.parameter_names

    @property
    def optimizer_step(self) -> Tensor:
        """The number of optimizer steps taken, float32, no dimensions."""
        return self._shards.optimizer_step

    def optimizer_numbers(self) -> OptimizerNumbers:
        """Return what the optimizer keeps beside its elements' state, of this rank's runs."""
        self._update.finish_copies()
        return self._update.numbers()

    def start_optimizer(self, numbers: OptimizerNumbers, *, num_steps: float) -> None:
        """Make the optimizer's state after `num_steps` steps, whose elements `wanted_state` yields to be filled."""
        self._offloaded.check_back("setting the optimizer's state", (StateKind.MOMENTS,))
        self._update.start(numbers, num_steps=num_steps)

    def offload_states(self, kinds: Collection[StateKind]) -> int:
        """Move state of these kinds from the device to host memory; return the bytes freed.

        Between two steps.  Working parameters and gradients that are whole on every rank stay.
        """
        self._gather.check_unpinned("offloading states")
        self.publish_late()
        self.written.find()
        self._gather.release_all()  # which takes secondary partitions for out of date
        self.ensure_parameters()
        self._reducer.finish()
        tensors = {**self._shards.tensors_on_device(), StateKind.MOMENTS: self._update.states_on_device()}
        moves_secondary = StateKind.PARTITIONS in kinds and self.plan.parameter.home is Home.DEVICE
        return self._offloaded.move(
            {kind: tensors[kind] for kind in kinds},
            computed=self._gather.memory.secondary.flats if moves_secondary else (),
        )

    def reload_states(self) -> None:
        """Bring back what `offload_states` has moved."""
        self._offloaded.move_back()

    def model_state_bytes(self, home: Home = Home.DEVICE) -> ModelStateBytes:
        """Return the bytes of model states that this rank has allocated at a home."""
        # An optimizer that keeps its state itself keeps none in files.
        own = self._update.optimizer_bytes(on_device=home is Home.DEVICE) if home is not Home.FILE else 0
        found = self._shards.model_state_bytes(home, optimizer_bytes=own)
        in_memory = Home.HOST if self.plan.parameter.home is Home.FILE else self.plan.parameter.home
        secondary = self._gather.memory.secondary.nbytes if home is in_memory else 0
        return replace(found, parameters=found.parameters + secondary)

    @property
    def optimizer_shape(self) -> OptimizerShape:
        """The optimizer's properties that formulas need."""
        inner, averages, passes = self.settings.optimizer, 0, 0
        if isinstance(inner, MeasuringOptimizer):
            averages, passes = sum(tensor.numel() for tensor in inner.own_memory), inner.num_passes
        return OptimizerShape(len(inner.kinds), averages, passes, in_8_bits=bool(inner.code_values))

    def home_traffic(self, num_micro_batches: int, *, num_gathers: int | None = None) -> HomeTraffic:
        """Return what a step of this rank moves between device, host memory and files (`zero/home_traffic.py`).

        num_gathers: those of each partitioned unit, by default as many as there can be of units with one use a pass.
        """
        return home_traffic(
            self._shards,
            self._sums.messages(),
            num_micro_batches,
            num_passes=self.optimizer_shape.num_passes,
            secondary=self.mesh.secondary.size,
            num_gathers=num_gathers,
        )

    @property
    def num_updated_by_host(self) -> int:
        """The elements of this rank whose master weights and moments the host updates."""
        return self._update.num_away

    def measure_files(self, nbytes: int) -> float | None:
        """Return the bytes a second that this rank writes to files of states and reads, from a file of this size.

        None where there is no room for it beside the states.
        """
        zero = self.settings.zero
        assert zero.nvme_path is not None, "the plan has a home in files"
        io = BlockIO(block_bytes=zero.aio_block_size, queue_depth=zero.aio_queue_depth)
        rate = file_bandwidth(zero.nvme_path, nbytes, io)
        io.close()
        return rate

    @property
    def files_are_direct(self) -> bool:
        """True if files of states are read and written past the system's cache, or there are none."""
        return all(files.is_direct for files in (self._files, self._parameter_files) if files is not None)

    @property
    def file_bytes(self) -> int:
        """The bytes that this rank's files of states take."""
        return sum(files.file_bytes for files in (self._files, self._parameter_files) if files is not None)

    @property
    def gradient_arenas(self) -> dict[str, ArenaStatistics]:
        """The statistics of the arenas of reduced gradients ("kept") and of leased "buckets", where there are any."""
        return self._reducer.arenas

    def owned_state(self, *, with_optimizer: bool = True) -> Iterator[StateFragment]:
        """Yield the state that this rank saves; over all ranks, every element of every parameter and kind once.

        with_optimizer: whether the optimizer's state is part of it, or weights alone.
        """
        self._check_state("reading the engine's state", with_optimizer=with_optimizer, is_written=False)
        self.check_updated("reading the engine's state")
        self._update.finish_copies()
        self.written.find()
        yield from self._shards.owned_state(self._coordinates, with_moments=with_optimizer)
        yield from self._update.optimizer_state(is_saved=True) if with_optimizer else ()

    def _check_state(self, call: str, *, with_optimizer: bool, is_written: bool) -> None:
        kinds = {StateKind.MOMENTS} if with_optimizer else set()
        for section in self.layout.sections:
            kinds |= self._shards.kinds_of_weights(section, is_written=is_written)
        self._offloaded.check_back(call, kinds)

    def counted_gradients(self) -> Iterator[StateFragment]:
        """Yield the reduced gradients that this rank counts; over all ranks, every element of a parameter once."""
        self._offloaded.check_back("reading gradients", (StateKind.GRADIENTS,))
        self._update.finish_copies()
        return self._update.counted_gradients()

    def wanted_state(self, *, with_optimizer: bool = True) -> Iterator[StateFragment]:
        """Yield the state that a checkpoint must fill on this rank; `state_loaded` must be called afterwards.

        with_optimizer: whether the optimizer's state is part of it, or weights alone.
        """
        self._check_state("loading state", with_optimizer=with_optimizer, is_written=True)
        self._gather.check_unpinned("loading state")
        self.ensure_parameters()  # what is still being published must not be written to
        self._update.finish_copies()
        self.written.find()  # found later, what a user has written would count instead of what is loaded
        yield from self._shards.wanted_state(with_moments=with_optimizer)
        yield from self._update.optimizer_state(is_saved=False) if with_optimizer else ()

    def state_loaded(self, *, weights_only: bool = False, names: Iterable[str] | None = None) -> None:
        """Copy what has been written into `wanted_state` to the working parameters of all ranks.

        names: the parameters whose values were loaded, the same on every rank; without it, all.
        With weights_only (no moments), master weights are then rounded to the working dtype, unless the configuration
        loads float32 weights.
        """
        self.num_weight_changes += 1
        if names is None or self.trained_specs().keys() <= set(names):
            self._update.loaded(WEIGHTS)
        self._gather.release_all()  # gathered parameters are copies of the old values
        self._shards.close_encoded()
        self._update.publish_masters(self.layout.trainable_buckets)
        self.ensure_parameters()
        if weights_only and not self.settings.zero.load_from_fp32_weights:
            self._update.finish_copies()
            self._shards.copy_working_to_master()
        self.written.forget(names)

    def trained_specs(self) -> dict[str, ParamSpec]:
        """Return the specs of the trainable parameters by name."""
        return {name: slot.spec for name, (section, slot) in self._slots.items() if section.trainable}

    def pieces(self, name: str, kind: str) -> Iterator[Piece]:
        """Return this rank's parts of a parameter's "master", "gradient" or optimizer state; none of a frozen one."""
        section, _ = self._slots[name]
        if kind == "master":
            needed = self._shards.kinds_of_weights(section, is_written=False)
        else:
            needed = {StateKind.GRADIENTS if kind == "gradient" else StateKind.MOMENTS}
        self._offloaded.check_back(f"access to the {kind} of {name}", needed)
        self._publisher.ensure(section.unit)  # what is still being published must not be written to
        self._update.finish_copies()
        self.written.find()
        return self._update.pieces(name, kind)

    def whole_state(self, name: str) -> dict[str, Tensor]:
        """Return the optimizer's state of a parameter that is not of its elements, by kind; equal on all ranks.

        Each has the logical tensor's dims; writing to it writes the state.
        """
        if found := self._update.whole_state(name):
            self._offloaded.check_back(f"access to the optimizer's state of {name}", (StateKind.MOMENTS,))
        return found

    def num_pieces(self, name: str) -> int:
        """Return the number of the parts that this rank owns of a parameter."""
        return self._update.num_pieces(name)

    def gradient_so_far(self, name: str) -> GradientSoFar | None:
        """Return this rank's part of what the passes of an incomplete step have added up; None before the first."""
        if not self._has_accumulated:
            return None
        _, slot = self._slots[name]
        axes = slot.spec.summed_over
        lifetime = self.plan.gradient.lifetime
        if lifetime is Lifetime.LEASED:  # reduced in every pass
            return GradientSoFar(list(self.pieces(name, "gradient")), 1.0, axes)
        found: Tensor | None
        if lifetime is Lifetime.RESIDENT:
            found = self._shards.resident_gradient_of(name) if name in self._reducer.present else None
        else:
            found = self._parameters[name].grad if self._guards is None else self._guards.accumulated(name)
        pieces = [] if found is None else [Piece(0, slot.spec.numel, found.detach().reshape(-1))]
        return GradientSoFar(pieces, self.predivisor, axes)

    def count_gradient(self, name: str) -> None:
        """Count a parameter whose gradient user code has set as one that has a gradient in this step."""
        self._reducer.present.add(name)

    def republish(self, name: str) -> None:
        """Copy a parameter's master weights, which a user has written to, to all ranks' copies; a collective call."""
        self._gather.check_unpinned("setting master weights")
        section, _ = self._slots[name]
        self.num_weight_changes += 1
        self._gather.release_all()
        self._update.publish_masters(section.buckets)
        self._publisher.ensure(section.unit)

    def is_in_leaf(self, name: str) -> bool:
        """Return True if a parameter is gathered with a leaf module."""
        unit = self._slots[name][0].unit
        return any(one.is_leaf for one in self.units if one.name == unit)

    def touched(self, name: str, call: str) -> None:
        """Gather a partitioned parameter that is about to be read, or raise UsageError outside forward and backward."""
        self._frames.touched(name, call)

    def lists_partitioned(self) -> bool:
        """Return False: a parameter that is detached is gathered, or an error."""
        return False

    def check_may_write(self, names: Iterable[str], call: str) -> None:
        """Raise UsageError while states are away from the device that a change of these parameters' values changes."""
        for name in names:
            section, _ = self._slots[name]
            self._offloaded.check_back(call, self._shards.kinds_of_weights(section, is_written=True))

    def gather(self, names: Iterable[str], why: str, *, is_modified: bool) -> None:
        """Gather parameters on every rank, and pin them until `release`; a collective call.

        is_modified: whether `release` stores their values.
        """
        if is_modified:
            self.check_may_write(names, why)
        self.publish_late()
        for name in names:
            unit = self._gather.unit_of(name)
            if unit is None:
                self._publisher.ensure(self._slots[name][0].unit)
            else:
                self._gather.pin_for_user(unit, why)
            if self.settings.zero.enable_sanity_checks:
                self._as_gathered[name] = self._bytes_of(name).clone()

    def check_unchanged(self, names: Iterable[str]) -> None:
        """Raise UsageError on every rank if one has changed gathered parameters, where the configuration checks that.

        A parameter that a block within this one has released is passed over.
        """
        if not self.settings.zero.enable_sanity_checks:
            return
        before = {name: self._as_gathered.get(name) for name in names}
        changed = {
            name: copy is not None and not torch.equal(copy, self._bytes_of(name)) for name, copy in before.items()
        }
        raise_changes(changed, self.data_parallel, self.mesh.device)

    def _bytes_of(self, name: str) -> Tensor:
        return self._parameters[name].detach().contiguous().view(-1).view(torch.uint8)

    def release(self, names: Iterable[str], *, modifier_rank: int | None) -> None:
        """Unpin gathered parameters; with modifier_rank store their values on that rank first, master weights too.

        Raises UsageError in the end for parameters that have become tensors of another form, and stay as they were.
        """
        problems = []
        for name in names:
            unit = self._gather.unit_of(name)
            if unit is not None and not self._shards.move_back(*self._slots[name]):
                rule = "gathered parameters keep their shape, number format and device"
                given = f"parameter {name}, which has become another tensor in GatheredParameters"
                problems.append(Problem(given, rule, "values of its own form"))
            if modifier_rank is not None:
                self.num_weight_changes += 1
                self.written.find()
                self._broadcast_value(name, modifier_rank)
                self._gather.memory.secondary.forget()
                self.written.accept(name)
            if unit is not None:
                self._gather.unpin(unit)
            self._as_gathered.pop(name, None)
        raise_problems(UsageError, problems)

    def register_external(self, module: nn.Module, name: str) -> None:
        """Gather parameter `name` for `module`'s forward too."""
        self._frames.register(module, self._slots[name][0].unit)

    def close(self) -> None:
        """Remove the hooks from the module; partitioned parameters stay without values, and guarded.

        What is being published is waited for, unless a collective has failed, after which none ends.
        """
        if self._flight.failed is None:
            if not self._late.has_failed:
                self.publish_late()
            self.ensure_parameters()
        self._late.close()
        self._frames.close()
        self.written.close()
        for module in self.model.modules():
            restore_apply(module)
        for handle in self._hooks:
            handle.remove()
        for files in (self._files, self._parameter_files):
            if files is not None:
                files.close()
        for name, parameter in self._parameters.items():
            detach_gradient_slot(parameter)
            if parameter.requires_grad:
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype
            if self._gather.unit_of(name) is None:
                detach_handle(parameter)

    def _make_files(self) -> FileStates | None:
        """Make the home of states in files, where the plan has one."""
        zero = self.settings.zero
        if self.plan.optimizer.home is not Home.FILE:
            return None
        num_kinds = 1 + len(self._kinds_in_files) + (self.plan.gradient.home is Home.FILE)
        pipelined = num_kinds * (1 + zero.offload_pipeline_read + zero.offload_pipeline_write)
        return self._file_states(zero.offload_buffer_count or pipelined, writes_behind=zero.offload_pipeline_write)

    @cached_property
    def _kinds_in_files(self) -> tuple[str, ...]:
        """The kinds of state beside the master weights that are in files."""
        return self.settings.optimizer.kinds if self.plan.optimizer.home is Home.FILE else ()

    def _make_parameter_files(self) -> FileStates | None:
        """Make the home of partitions of parameters in files, where the plan has one."""
        if self.plan.parameter.home is not Home.FILE:
            return None
        return self._file_states(self.settings.zero.offload_param_buffer_count, writes_behind=True)

    def _file_states(self, num_buffers: int, *, writes_behind: bool) -> FileStates:
        zero = self.settings.zero
        assert zero.nvme_path is not None, "the rules ask for it"
        is_pinned = zero.offload_pin_memory and self.mesh.device.type == "cuda"
        return FileStates(
            zero.nvme_path,
            num_buffers=num_buffers,
            memory=AlignedMemory(is_pinned=is_pinned, ledger=self.settings.ledger),
            io=BlockIO(block_bytes=zero.aio_block_size, queue_depth=zero.aio_queue_depth),
            writes_behind=writes_behind,
            record=partial(self.mesh.meter.record, FILE),
        )

    def _broadcast_value(self, name: str, source: int) -> None:
        """Store the parameter's values on data-parallel rank `source` on every rank."""
        section, slot = self._slots[name]
        self.data_parallel.broadcast(self._shards.flat(section)[slot.start : slot.stop], source).wait()
        self._shards.store_value(section, name)

    def _enter_leaf(self, units: Sequence[str]) -> None:
        """Gather a leaf module's units for its backward, and wait for no gradient that this rank has none of.

        A pass that has not begun begins here, as it does on ranks whose first gradient comes in the module.
        """
        if not self._reducer.is_in_micro_batch and self.before_leaf is not None and self._reducer.gives_gradients():
            self.before_leaf()
        self._gather.gather_leaf(units)
        self._reducer.enter_leaf(self._trainable_in(units))

    def _trainable_in(self, units: Collection[str]) -> list[str]:
        return [name for name, (section, _) in self._slots.items() if section.trainable and section.unit in units]

    def _trainable_names(self) -> set[str]:
        return {name for name, (section, _) in self._slots.items() if section.trainable}

    def _gradient_ready(self, name: str, parameter: Tensor) -> None:
        self._flight.unit = name
        if not self._reducer.is_in_micro_batch and self.before_stray_gradient is not None:
            self.before_stray_gradient(name)
        with torch._C.DisableTorchFunctionSubclass():  # a partitioned parameter would take a microsecond each time
            if (gradient := parameter.grad) is not None:
                self.settings.ledger.tag(gradient, "gradients")
            self._reducer.gradient_ready(name)
        if self._gather.is_needed:
            self._gather.gradient_ready(name)
