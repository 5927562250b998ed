"""The update: norms of reduced gradients, the inner optimizer on what this rank owns, and publishing."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero.comm.mesh import Mesh
from megazero.memory.copies import ARRIVED, Arrival
from megazero.memory.homes import StateHome
from megazero.memory.lease import Scratch
from megazero.optim.grad_norm import first_overflow
from megazero.optim.inner import NOT_UPDATED, ElementRun, InnerOptimizer, MeasuringOptimizer, StepInputs, advance
from megazero.parallel.param_spec import StateElsewhere, StateFragment
from megazero.timers import Timers
from megazero.zero.gradients.gradient_norms import GradientNorms
from megazero.zero.gradients.whole_figures import Figures, WholeFigures
from megazero.zero.late_update import LateWeights
from megazero.zero.layout import Bucket, Fragment, Range
from megazero.zero.parameters.publish import ParameterPublisher
from megazero.zero.shards import Shards, SubGroup

STEP = "step"
# The parts of an update that are loaded apart: parameters, and the optimizer's state.
WEIGHTS, STATE = "weights", "state"


class LocalNorms(NamedTuple):
    """The share of this rank in the global figures, on the device, before any reduction over ranks.

    square: sum of squares over the elements this rank counts, float64.
    first_overflow: index (in layout order) of its first parameter with a gradient that is not finite, int32.
    """

    square: Tensor
    first_overflow: Tensor


class OwnedRun(NamedTuple):
    """A run of elements of a sub-group that this rank updates at once; `within` is its range of the bucket's section.

    group: that of the optimizer.  tensors: None where the optimizer's states are in files.
    parameter: the name of the only parameter in it, once that has had no gradient in a step; else "".
    """

    sub_group: SubGroup
    within: Range
    group: int
    tensors: ElementRun | None
    parameter: str = ""

    @property
    def bucket(self) -> Bucket:
        return self.sub_group.bucket


class _HomeStep(NamedTuple):
    """The number of a step and its inputs, on the device that updates what lives in one home.

    figures: those of whole parameters, of each pass of a measuring optimizer so far.
    """

    step: Tensor
    inputs: StepInputs
    figures: tuple[Figures, ...] = ()

    def at_present(self, groups: Sequence[Mapping[str, Any]]) -> "_HomeStep":
        """Return the step with the options that the optimizer's groups have now, whenever it is taken."""
        options = [
            {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
            for group in groups
        ]
        return _HomeStep(self.step.clone(), self.inputs._replace(options=options))


class OptimizerNumbers(NamedTuple):
    """An optimizer's values beside its elements' state, such as a count of steps; None for what has no state yet.

    groups: by param group.  parameters: by the names of parameters whose numbers may differ from their group's, as
    steps have left them alone; for an optimizer whose moments lie in the shards, their own "step".
    """

    groups: Mapping[int, Mapping[str, float] | None]
    parameters: Mapping[str, Mapping[str, float] | None]


class Piece(NamedTuple):
    """The elements [start, stop) of a parameter's state; writing to `tensor`, one-dimensional, writes the state.

    A moment in 8 bits is stored by the next call that reads or updates state.
    """

    start: int
    stop: int
    tensor: Tensor


class ShardUpdate:
    """The update of the ranges that this rank owns, bucket by bucket in forward order."""

    def __init__(
        self,
        shards: Shards,
        publisher: ParameterPublisher,
        optimizer: InnerOptimizer,
        *,
        reads_ahead: bool = True,
        num_at_once: int | None = None,
        counted_at: Mapping[str, int],
        mesh: Mesh,
        timers: Timers,
        names: Sequence[str] = (),
    ) -> None:
        """Divide what this rank owns into runs.

        reads_ahead: whether states in files are read while others are updated.
        num_at_once: the optimizer's first steps that are not late; after them updates of what does not live on the
        device run beside the next step.  None: no step is late.
        counted_at: this rank's coordinates on the axes over which parameters may be replicated ({"tp": 1}).
        mesh: that of the ranks over which figures of parameters are summed for an optimizer that measures.
        names: the parameters that `LocalNorms.first_overflow` counts, the same on all ranks; without them, those of the
        layout.
        """
        self._shards = shards
        self._publisher = publisher
        self._optimizer = optimizer
        self._measuring = optimizer if isinstance(optimizer, MeasuringOptimizer) else None
        self._timers = timers
        self._buckets = shards.layout.trainable_buckets
        self._coordinates = dict(counted_at)
        self._late, self._num_at_once = shards.late, num_at_once
        self._partial: set[str] = set()  # what an update that an exception has ended leaves to be loaded
        # A late update goes through the buckets as the next backward will, which waits for those it overwrites.
        self._in_order = self._buckets if num_at_once is None else self._buckets[::-1]
        in_files = filter(shards.is_in_files, self._in_order)
        self._sub_groups_in_files = [sub_group for bucket in in_files for sub_group in shards.sub_groups(bucket)]
        self._num_fetched = self._num_updated = 0  # of these, in this step; what is updated without counts as fetched
        self._reads_ahead = reads_ahead
        self.runs = [
            run for bucket in self._buckets for sub_group in shards.sub_groups(bucket) for run in self._runs(sub_group)
        ]
        self._left_alone: dict[str, Tensor] = {}  # by parameter, the steps that have left it as it was, float32
        if optimizer.keeps_state:
            optimizer.bind([self._bound(owned) for owned in self.runs])
        self.parameter_names = tuple(names) or tuple(
            slot.spec.name for section in shards.layout.sections if section.trainable for slot in section.slots
        )
        device = shards.optimizer_step.device
        self._index_of = {name: index for index, name in enumerate(self.parameter_names)}
        partition = [
            (bucket, fragment) for bucket in self._buckets for fragment in bucket.fragments_in(shards.partition(bucket))
        ]
        indices = [self._index_of[fragment.spec.name] for _, fragment in partition]
        self._fragment_parameters = torch.tensor(indices, dtype=torch.int32, device=device)
        slots = [slot for section in shards.layout.sections for slot in section.slots]
        self._left_out = {slot.spec.name for slot in slots if slot.group == NOT_UPDATED}
        counted = [
            fragment.spec.is_counted_on(self._coordinates) and fragment.spec.name not in self._left_out
            for _, fragment in partition
        ]
        self._counted = torch.tensor(counted, dtype=torch.float64, device=device)
        within = [(bucket, fragment.within) for bucket, fragment in partition]
        self._norms = GradientNorms(shards, within, reads_ahead=reads_ahead)
        self._homes = list(dict.fromkeys(map(shards.home, self._buckets)))
        self._travelling: list[Arrival] = []  # updated weights on their way to the device
        if self._measuring is not None:
            parameters = shards.updated_parameters()
            self._whole_figures = WholeFigures([each.spec for each in parameters], mesh)
            self._measuring.begin(parameters, shards.plan.averages_dtype, device)
            for tensor in self._measuring.own_memory:
                shards.ledger.tag(tensor, "moments")

    @property
    def is_partial(self) -> bool:
        """True in an update, and behind one that an exception has ended: the state is that of no step."""
        return bool(self._partial)

    @property
    def has_late_steps(self) -> bool:
        """True if there are steps whose updates of what does not live on the device are late."""
        return self._num_at_once is not None

    @property
    def num_away(self) -> int:
        """The elements that the host updates, since they do not live on the device."""
        away = (owned for owned in self.runs if not self._shards.home(owned.bucket).is_device)
        return sum(owned.within.numel for owned in away if owned.group != NOT_UPDATED)

    def largest_buffer_bytes(self, *, on_device: bool) -> int:
        """The bytes that fit the gradients of one update, and one fragment's in the dtype of its norm's sum.

        on_device: those of buckets whose home is the device; else those of the others.
        """
        runs = (
            owned.within.numel * self._shards.plan.optimizer.itemsize
            for owned in self.runs
            if self._shards.home(owned.bucket).is_device == on_device
        )
        return max(*runs, self._norms.largest_buffer_bytes(on_device=on_device), 0)

    def local_norms(self, buffers: Scratch) -> LocalNorms:
        """Compute norms over this rank's partitions: the same fragments in every stage, so stages agree to the bit."""
        self._begin_pass()
        if not self._norms.are_of_files:  # which need the buffers
            self._fetch_next()
        norms = self._norms.take(buffers)
        self._fetch_next()  # the update comes next
        # A replicated fragment is not multiplied by zero but left out: 0 * inf would be nan.  What overflows here
        # alone, in a copy that another rank counts, is an overflow all the same.
        square = torch.where(self._counted > 0, norms.square(), 0.0).sum()
        square = square + torch.where(torch.isfinite(norms), 0.0, torch.inf).sum()
        return LocalNorms(square, first_overflow(norms, self._fragment_parameters))

    def counted_gradients(self) -> Iterator[StateFragment]:
        """Yield the gradients whose norms this rank counts in `local_norms`."""
        for bucket in self._buckets:
            for part in self._shards.gradient_parts(bucket, self._shards.partition(bucket)):
                for spec, start, stop, within in bucket.fragments_in(part):
                    if spec.is_counted_on(self._coordinates) and spec.name not in self._left_out:
                        gradient = self._shards.gradient_source(bucket, within)
                        yield StateFragment(spec, "gradient", start, stop, gradient)

    def apply(self, inputs: StepInputs, buffers: Scratch, absent: Mapping[str, Tensor]) -> None:
        """Take one optimizer step on the owned ranges; each bucket is published as soon as it is done.

        absent: flags, float32 without dimensions, by the parameters that may be left alone: 1 leaves one as it is, with
        its moments and its number of steps.
        Where a flag or an overflow may keep a torch optimizer from stepping, the host waits for the device.
        """
        self.publish_late()
        self._begin_pass()
        if self._optimizer.skips_on_host and inputs.found_inf is not None and bool(inputs.found_inf.item()):
            self._shards.forget_state_fetches()
            self._num_fetched = 0
            return
        self._partial = {WEIGHTS, STATE}  # until its end
        step = self._shards.optimizer_step
        advance(step, inputs)
        for name, flag in absent.items():
            self._separate(name)
            self._left_alone[name] += flag if inputs.found_inf is None else flag * (1.0 - inputs.found_inf)
        inputs = inputs.for_masters(self._shards.plan.optimizer.dtype)
        steps = {home: _at_home(home, step, inputs) for home in self._homes}
        if self._measuring is not None:
            steps = self._measure(self._measuring, steps, buffers, absent)
        late_steps = {
            home: at_home.at_present(self._optimizer.options)
            for home, at_home in steps.items()
            if self._is_late(home, at_home)
        }
        runs: dict[int, list[int]] = {bucket.index: [] for bucket in self._in_order}
        for index, owned in enumerate(self.runs):
            runs[owned.bucket.index].append(index)
        late: list[tuple[Bucket, Callable[[], None]]] = []
        for bucket in self._in_order:
            home = self._shards.home(bucket)
            indices, memory = runs[bucket.index], home.scratch(buffers)
            if home in late_steps:
                late.append((bucket, partial(self._update_late, bucket, indices, late_steps[home], absent, memory)))
                continue
            for index in indices:
                with self._timers.measure("optimizer-inner-step"):
                    self._update_run(index, steps[home], absent, memory)
                if self._is_last_of_sub_group(index):
                    self._leave(self.runs[index].sub_group, is_last=index == indices[-1])
        self._publisher.send_rest()
        if late:
            self._late.begin(late)
        self._partial.clear()

    def _measure(
        self,
        optimizer: MeasuringOptimizer,
        steps: Mapping[StateHome, "_HomeStep"],
        buffers: Scratch,
        absent: Mapping[str, Tensor],
    ) -> dict[StateHome, "_HomeStep"]:
        """Return the steps with the figures of all parameters, after the passes over what this rank updates.

        Every element is measured on all ranks that update it, and counted on one.
        """
        device, steps = self._shards.device, dict(steps)
        taken = self._steps_taken(absent)
        for number in range(optimizer.num_passes):
            numels = partial(optimizer.num_figures, number)
            local = {home.device: self._whole_figures.zeros(numels, home.device) for home in self._homes}
            for index, owned in enumerate(self.runs):
                home = self._shards.home(owned.bucket)
                self._fetch_next()
                if (at_home := self._step_of(owned, steps[home], absent)) is not None:
                    with self._timers.measure("optimizer-inner-step"):
                        for part, is_counted in self._measured_parts(owned):
                            run, inputs = self._of_parameter(owned, part, steps[home], at_home.inputs)
                            into = local[home.device].of(run.parameter) if is_counted else None
                            memory = home.scratch(buffers)
                            optimizer.measure(number, run, at_home.step, inputs, into, buffers=memory)
                            del run  # what is in files stays in memory as long as it is referred to
                if self._is_last_of_sub_group(index):
                    self._leave_measured(owned.sub_group)
            mine = local.pop(device, None) or self._whole_figures.zeros(numels, device)
            for elsewhere in local.values():
                mine.flat += elsewhere.flat.to(device)
            figures = self._whole_figures.add_up(mine, partial(optimizer.whole_figures, number))
            optimizer.finish_pass(number, {name: figures.of(name) for name in self._whole_figures.names}, taken)
            for home, at_home in steps.items():
                steps[home] = at_home._replace(figures=(*at_home.figures, figures.to(home.device)))
        return steps

    def _steps_taken(self, absent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the number of this step for each parameter that takes it, where the optimizer measures."""
        step = self._shards.optimizer_step
        left = ((name, self._left_alone.get(name)) for name in self._whole_figures.names)
        counts = {name: step if own is None else step - own for name, own in left}
        return {name: count for name, count in counts.items() if name not in absent or not bool(absent[name].item())}

    def _measured_parts(self, owned: OwnedRun) -> Iterator[tuple[Fragment, bool]]:
        """Yield the parts of a run by parameter, and whether they count on this rank.

        Only what this rank partitions counts, in every stage, of a parameter that several ranks hold alike on one of
        them; and not the vocabulary's padding, which lies behind a rank's rows.
        """
        partition = self._shards.partition(owned.bucket)
        for fragment in owned.bucket.fragments_in(owned.within):
            spec, start, _, (first, last) = fragment
            padding = first + max(spec.box.numel - start, 0)
            cuts = sorted({first, last, *(cut for cut in (*partition, padding) if first < cut < last)})
            for begin, end in pairwise(cuts):
                counts = partition.start <= begin < partition.stop and begin < padding
                part = fragment.clipped(Range(begin, end))
                assert part is not None, "parts have elements"
                yield part, counts and spec.is_counted_on(self._coordinates)

    def _of_parameter(
        self, owned: OwnedRun, part: Fragment, at_home: "_HomeStep", inputs: StepInputs
    ) -> tuple[ElementRun, StepInputs]:
        """Return the tensors of a part of a run that is of one parameter, and a step's inputs with its figures."""
        name = part.spec.name
        run = self._tensors(owned, part.within)._replace(parameter=name, start=part.start)
        return run, inputs._replace(figures=tuple(each.of(name) for each in at_home.figures))

    def _leave_measured(self, sub_group: SubGroup) -> None:
        """Begin to write what a pass has changed of a sub-group in files; the update comes to it later."""
        if not self._shards.is_in_files(sub_group.bucket):
            return
        self._shards.store_moments(sub_group)
        self._count_left()
        self._begin_pass()

    def states_on_device(self) -> list[Tensor]:
        """Return the tensors of the device that hold the optimizer's state."""
        own = (
            tensor
            for index, owned in enumerate(self.runs)
            if self._shards.home(owned.bucket).is_device and self._optimizer.keeps_state
            for tensor in self._optimizer.state(index, self._bound(owned)).values()
        )
        of_parameters = () if self._measuring is None else self._measuring.own_memory
        return [*self._shards.moments_on_device(), *own, *of_parameters]

    def finish_copies(self) -> None:
        """Wait until the host may read and write the optimizer's state.

        A late update has ended then, and the master weights updated last have reached the device.  What has been
        written to moments in 8 bits since the call before is stored.
        """
        self._late.finish()
        while self._travelling:
            self._travelling.pop().finish()
        self._shards.close_blocks()

    def publish_late(self) -> None:
        """Wait for a late update, and publish what it has made; a collective call of the data-parallel ranks."""
        self.finish_copies()
        for bucket in self._buckets:
            if bucket.index in self._late.unpublished:
                values = self._late.weights[bucket.index].values
                arrival = self._shards.copy_to_working(bucket, self._shards.owned(bucket), values)
                self._shards.store_partition(bucket)
                self._publisher.publish(bucket, arrival)
                self._late.weights[bucket.index] = LateWeights(values, arrival)
        self._publisher.send_rest()
        self._late.unpublished.clear()

    def publish_masters(self, buckets: Iterable[Bucket]) -> None:
        """Copy the master weights of whole buckets to the working parameters of all ranks that have them."""
        self.finish_copies()
        for bucket in buckets:
            self._late.unpublished.discard(bucket.index)
            arrival = ARRIVED
            for sub_group in self._shards.sub_groups(bucket):
                arrival = self._shards.copy_master_to_working(sub_group)
                arrival.finish()  # what is in a file is in memory only as long as it is referred to
            self._shards.store_partition(bucket)
            self._publisher.publish(bucket, arrival)
        self._publisher.send_rest()

    def _is_late(self, home: StateHome, at_home: "_HomeStep") -> bool:
        """Return True if a step's update of what lives in a home runs beside the next step."""
        return self._num_at_once is not None and not home.is_device and int(at_home.step.item()) > self._num_at_once

    def _update_late(
        self,
        bucket: Bucket,
        indices: Sequence[int],
        at_home: "_HomeStep",
        absent: Mapping[str, Tensor],
        memory: Scratch,
    ) -> None:
        """Update a bucket and leave its new weights in the working parameters' format, to be published later."""
        first = self._shards.owned(bucket).start
        weights = self._late.weights.get(bucket.index) or self._make_late_weights(bucket)
        weights.arrival.finish()  # the step before may still be on its way to the device
        for index in indices:
            self._update_run(index, at_home, absent, memory)
            if self._is_last_of_sub_group(index):
                sub_group = self.runs[index].sub_group
                within = sub_group.within
                values = weights.values[within.start - first : within.stop - first]
                values.copy_(self._shards.master(bucket, within))
                self._store(sub_group, ARRIVED)

    def _make_late_weights(self, bucket: Bucket) -> LateWeights:
        dtype = self._shards.layout.sections[bucket.section].dtype
        values = self._shards.home(bucket).zeros(self._shards.owned(bucket).numel, dtype)
        self._late.weights[bucket.index] = LateWeights(values, ARRIVED)
        return self._late.weights[bucket.index]

    def _update_run(self, index: int, at_home: "_HomeStep", absent: Mapping[str, Tensor], memory: Scratch) -> None:
        owned = self.runs[index]
        self._fetch_next()
        if (of_run := self._step_of(owned, at_home, absent)) is None:
            return
        step, inputs, _ = of_run
        if self._measuring is None:
            # No name for the tensors: what is in files stays in memory as long as it is referred to.
            self._optimizer.update(index, self._tensors(owned), step, inputs, buffers=memory)
            return
        for part in owned.bucket.fragments_in(owned.within):
            run, of_parameter = self._of_parameter(owned, part, at_home, inputs)
            self._optimizer.update(index, run, step, of_parameter, buffers=memory)
            del run

    def _is_last_of_sub_group(self, index: int) -> bool:
        following = self.runs[index + 1].sub_group if index + 1 < len(self.runs) else None
        return following is not self.runs[index].sub_group

    def _leave(self, sub_group: SubGroup, *, is_last: bool) -> None:
        """Send an updated sub-group to the working parameters and to its file; is_last: of its bucket."""
        arrival = self._shards.copy_master_to_working(sub_group)
        self._store(sub_group, arrival)
        if is_last:  # copies arrive in order
            self._shards.store_partition(sub_group.bucket)
            self._publisher.publish(sub_group.bucket, arrival)
        self._travelling.append(arrival)

    def _fetch_next(self) -> None:
        """Begin to read the states of the sub-groups that are updated next, as far as there are buffers."""
        while self._reads_ahead and self._num_fetched < len(self._sub_groups_in_files):
            if not self._shards.fetch(self._sub_groups_in_files[self._num_fetched]):
                return
            self._num_fetched += 1

    def _store(self, sub_group: SubGroup, arrival: Arrival) -> None:
        """Begin to write an updated sub-group to its file, if it has one; arrival: that of copies of it."""
        if not self._shards.is_in_files(sub_group.bucket):
            return
        self._shards.store(sub_group, arrival)
        self._count_left()

    def _count_left(self) -> None:
        """Count a sub-group in files that this pass over them is done with."""
        self._num_updated += 1
        # One that found no buffer to be fetched to has come all the same; after its update it has no use.
        self._num_fetched = max(self._num_fetched, self._num_updated)

    def loaded(self, part: str) -> None:
        """Begin anew after an update that an exception has ended, once both parts, WEIGHTS and STATE, are loaded."""
        if part in self._partial:
            self._partial.discard(part)
            self._shards.forget_state_fetches()
            self._num_fetched = self._num_updated = 0

    def _begin_pass(self) -> None:
        """Let sub-groups in files be fetched for the next pass, if one over all of them has ended.

        After the update the next pass is that of the next step: until then sums of gradients have the buffers.
        """
        if self._num_updated == len(self._sub_groups_in_files):
            self._num_fetched = self._num_updated = 0

    def pieces(self, name: str, kind: str) -> Iterator[Piece]:
        """Yield what this rank owns of a trainable parameter's "master", "gradient", or optimizer state `kind`.

        Pieces come in order; there are none where the optimizer has no such state (yet).
        """
        shards = self._shards
        of_shards = {"master": shards.master, "gradient": shards.reduced_gradient}
        of_shards |= {moment: partial(shards.moment, moment) for moment in shards.moment_kinds}
        for index, owned in enumerate(self.runs):
            fragment = owned.bucket.fragment_of(name, owned.within)
            if fragment is None:
                continue
            if kind in of_shards:
                yield Piece(fragment.start, fragment.stop, of_shards[kind](owned.bucket, fragment.within))
            elif (found := self._own_state(index, owned, fragment.within).get(kind)) is not None:
                tensor = found if isinstance(found, Tensor) else found.view()
                yield Piece(fragment.start, fragment.stop, tensor)

    def num_pieces(self, name: str) -> int:
        """Return the number of the pieces that `pieces` yields of a kind of state that every element has."""
        return sum(owned.bucket.fragment_of(name, owned.within) is not None for owned in self.runs)

    def optimizer_state(self, *, is_saved: bool) -> Iterator[StateFragment]:
        """Yield the owned ranges' state that a torch optimizer allocates itself, beside the moments in the shards.

        is_saved: only what this rank saves, which no other one counts; else all that it has.
        """
        yield from self._whole_state(is_saved=is_saved)
        for index, owned in enumerate(self.runs if self._optimizer.keeps_state else ()):
            bucket, within = owned.bucket, owned.within
            saved = self._shards.partition(bucket) if is_saved else within
            part = Range(max(saved.start, within.start), min(saved.stop, within.stop))
            for fragment in bucket.fragments_in(part) if part.numel > 0 else ():
                if is_saved and not fragment.spec.is_counted_on(self._coordinates):
                    continue
                for kind, source in self._own_state(index, owned, fragment.within).items():
                    yield StateFragment(fragment.spec, kind, fragment.start, fragment.stop, source)

    def _whole_state(self, *, is_saved: bool) -> Iterator[StateFragment]:
        """Yield the state that is of whole parameters, and equal on all ranks that have elements of them."""
        if self._measuring is None or (is_saved and self._shards.rank):
            return
        for name in self._whole_figures.names:
            for kind, (spec, tensor) in self._measuring.state_of(name).items():
                if not is_saved or spec.is_counted_on(self._coordinates):
                    yield StateFragment(spec, kind, 0, spec.numel, tensor.view(-1))

    def whole_state(self, name: str) -> dict[str, Tensor]:
        """Return a parameter's state that is not of its elements, by kind."""
        found = {} if self._measuring is None else self._measuring.state_of(name)
        return {kind: tensor for kind, (_, tensor) in found.items()}

    def numbers(self) -> OptimizerNumbers:
        """Return the numbers of the runs on this rank."""
        groups: dict[int, Mapping[str, float] | None] = {}
        parameters: dict[str, Mapping[str, float] | None] = {}
        for index, owned in enumerate(self.runs):
            if owned.group != NOT_UPDATED and not owned.parameter:
                groups.setdefault(owned.group, self._optimizer.numbers(index))
            elif owned.group != NOT_UPDATED and self._optimizer.keeps_state:
                parameters[owned.parameter] = self._optimizer.numbers(index)
        if not self._optimizer.keeps_state:
            step = float(self._shards.optimizer_step.item())
            parameters |= {name: {STEP: step - float(left.item())} for name, left in self._left_alone.items()}
        return OptimizerNumbers(groups, parameters)

    def start(self, numbers: OptimizerNumbers, *, num_steps: float) -> None:
        """Make the state of all runs, whose elements the caller fills; the optimizer has taken `num_steps` steps."""
        self.loaded(STATE)
        self._shards.optimizer_step.fill_(num_steps)
        for name in numbers.parameters:
            self._separate(name)
        for name, left in self._left_alone.items():
            own = numbers.parameters.get(name, {STEP: num_steps}) or {STEP: 0.0}
            left.fill_(num_steps - own.get(STEP, num_steps))
        for index, owned in enumerate(self.runs):
            if owned.group != NOT_UPDATED:
                of_group = numbers.groups.get(owned.group)
                self._optimizer.start(index, numbers.parameters.get(owned.parameter, of_group))

    def optimizer_bytes(self, *, on_device: bool) -> int:
        """Return the bytes of the state that an optimizer allocates itself; on_device: there, else elsewhere."""
        if self._measuring is not None and on_device:
            return sum(tensor.nbytes for tensor in self._measuring.own_memory)
        if not self._optimizer.keeps_state:
            return 0
        kept = (
            self._optimizer.state(index, self._bound(owned))
            for index, owned in enumerate(self.runs)
            if self._shards.home(owned.bucket).is_device == on_device
        )
        return sum(tensor.nbytes for state in kept for tensor in state.values())

    def _step_of(self, owned: OwnedRun, at_home: _HomeStep, flags: Mapping[str, Tensor]) -> _HomeStep | None:
        """Return the step of a run; None if the host leaves it alone, as it does what the optimizer was not given.

        A run of one parameter may have taken fewer steps than the others, and a flag of 1 leaves it as it is.
        """
        if owned.group == NOT_UPDATED:
            return None
        if not owned.parameter:
            return at_home
        step, inputs, _ = at_home
        left, absent = self._left_alone[owned.parameter], flags.get(owned.parameter)
        step = step - (left if left.device == step.device else left.to(step.device))
        if absent is not None:
            if self._optimizer.skips_on_host and bool(absent.item()):
                return None
            absent = absent if absent.device == step.device else absent.to(step.device)
            found_inf = absent if inputs.found_inf is None else torch.maximum(inputs.found_inf, absent)
            inputs = inputs._replace(found_inf=found_inf)
        return _HomeStep(step, inputs)

    def _separate(self, name: str) -> None:
        """Divide the runs that a parameter lies in, so that its elements are runs of their own from here on."""
        if name in self._left_alone:
            return
        self._left_alone[name] = torch.zeros_like(self._shards.optimizer_step)
        divided: list[OwnedRun] = []
        for owned in self.runs:
            fragment = owned.bucket.fragment_of(name, owned.within)
            block = self._shards.layout.rules.trained_block
            parts = [owned] if fragment is None else list(_divided(owned, fragment, block))
            if fragment is not None and self._optimizer.keeps_state:
                self._optimizer.divide(len(divided), [self._bound(part) for part in parts])
            divided += parts
        self.runs = divided

    def _runs(self, sub_group: SubGroup) -> Iterator[OwnedRun]:
        section = self._shards.layout.sections[sub_group.bucket.section]
        for group, within in section.group_runs(sub_group.within):
            run = OwnedRun(sub_group, within, group, None)
            yield run if self._shards.is_in_files(sub_group.bucket) else run._replace(tensors=self._tensors(run))

    def _own_state(self, index: int, owned: OwnedRun, within: Range) -> Mapping[str, Tensor | StateElsewhere]:
        """Return the state of a part of a run that a torch optimizer keeps, by kind; empty before its first step."""
        if not self._optimizer.keeps_state:
            return {}
        state = self._optimizer.state(index, self._bound(owned))
        if owned.tensors is None:
            return {kind: self._shards.moment_source(kind, owned.bucket, within) for kind in state}
        start = within.start - owned.within.start
        return {kind: tensor[start : start + within.numel] for kind, tensor in state.items()}

    def _bound(self, owned: OwnedRun) -> ElementRun:
        """Return a run's tensors, without elements where the states are in files and come for an update only."""
        if owned.tensors is not None:
            return owned.tensors
        nothing = torch.empty(0, dtype=self._shards.plan.optimizer.dtype)
        return ElementRun(nothing, nothing, {}, owned.group)

    def _tensors(self, owned: OwnedRun, part: Range | None = None) -> ElementRun:
        """Return the tensors of a run, or of a part of it; those at home in files come to host memory for it."""
        within = owned.within if part is None else part
        if owned.tensors is not None:
            start = owned.within.start
            return owned.tensors if part is None else owned.tensors.part(part.start - start, part.stop - start)
        shards, bucket = self._shards, owned.bucket
        moments = {kind: shards.moment(kind, bucket, within) for kind in shards.kinds_of(bucket)}
        master, gradient = shards.master(bucket, within), shards.reduced_gradient(bucket, within)
        return ElementRun(master, gradient, moments, owned.group, blocks=shards.blocks(bucket, within))


def _at_home(home: StateHome, step: Tensor, inputs: StepInputs) -> _HomeStep:
    """Return a step for the update of what lives in a home; the host waits for the inputs of its own."""
    return _HomeStep(step, inputs) if home.is_device else _HomeStep(step.to(home.device), inputs.to(home.device))


def _divided(owned: OwnedRun, fragment: Fragment, block: int) -> Iterator[OwnedRun]:
    """Yield the parts of a run before, in and behind one of its parameters, as far as they have elements.

    A parameter's last block is all its own, with the padding in it.
    """
    start, stop = owned.within
    cuts = Range(fragment.within.start, min(-(-fragment.within.stop // block) * block, stop))
    for part, name in (
        (Range(start, cuts.start), ""),
        (cuts, fragment.spec.name),
        (Range(cuts.stop, stop), ""),
    ):
        if part.numel > 0:
            run = None if owned.tensors is None else owned.tensors.part(part.start - start, part.stop - start)
            yield OwnedRun(owned.sub_group, part, owned.group, run, name or owned.parameter)
