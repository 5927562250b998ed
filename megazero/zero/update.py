"""The update: norms of reduced gradients, the inner optimizer on what this rank owns, and publishing."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.memory.copies import Arrival
from megazero.memory.homes import StateHome
from megazero.memory.lease import Scratch
from megazero.optim.grad_norm import first_overflow, fragment_norms, sum_dtype
from megazero.optim.inner import NOT_UPDATED, InnerOptimizer, Run, StepInputs, advance
from megazero.parallel.param_spec import StateFragment
from megazero.timers import Timers
from megazero.zero.layout import Bucket, Fragment, Range
from megazero.zero.publish import ParameterPublisher
from megazero.zero.shards import Shards

STEP = "step"


class LocalNorms(NamedTuple):
    """The share of this rank in the global figures, on the device, before any reduction over ranks.

    square: sum of squares over the elements this rank counts, float64.
    first_overflow: index (in layout order) of its first parameter with a gradient that is not finite, int32.
    """

    square: Tensor
    first_overflow: Tensor


class OwnedRun(NamedTuple):
    """A run of elements that this rank updates at once; `within` is its range of the bucket's section.

    parameter: the name of the only parameter in it, once that has had no gradient in a step; else "".
    """

    bucket: Bucket
    within: Range
    run: Run
    parameter: str = ""


class _HomeStep(NamedTuple):
    """The number of a step and its inputs, on the device that updates what lives in one home."""

    step: Tensor
    inputs: StepInputs


class OptimizerNumbers(NamedTuple):
    """What an optimizer keeps beside its elements' state, such as a count of steps; None for what has no state yet.

    groups: by param group.  parameters: by the names of parameters whose numbers may differ from their group's, as
    steps have left them alone; for an optimizer whose moments lie in the shards, their own "step".
    """

    groups: Mapping[int, Mapping[str, float] | None]
    parameters: Mapping[str, Mapping[str, float] | None]


class Piece(NamedTuple):
    """The elements [start, stop) of a parameter's state; writing to `tensor`, one-dimensional, writes the state."""

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
        sub_group_numel: int,
        counted_at: Mapping[str, int],
        timers: Timers,
        names: Sequence[str] = (),
    ) -> None:
        """Divide what this rank owns into runs; sub_group_numel: most elements updated at once.

        counted_at: this rank's coordinates on the axes over which parameters may be replicated ({"tp": 1}).
        names: the parameters that `LocalNorms.first_overflow` counts; without them, those of the layout.
        """
        self._shards = shards
        self._publisher = publisher
        self._optimizer = optimizer
        self._timers = timers
        self._buckets = shards.layout.trainable_buckets
        self._coordinates = dict(counted_at)
        self.runs = [run for bucket in self._buckets for run in self._runs(bucket, sub_group_numel)]
        self._left_alone: dict[str, Tensor] = {}  # by parameter, the steps that have left it as it was, float32
        optimizer.bind([owned.run for owned in self.runs])
        self.parameter_names = tuple(names) or tuple(
            slot.spec.name for section in shards.layout.sections if section.trainable for slot in section.slots
        )
        device = shards.optimizer_step.device
        index_of = {name: index for index, name in enumerate(self.parameter_names)}
        partition = [
            (bucket, fragment) for bucket in self._buckets for fragment in bucket.fragments_in(shards.partition(bucket))
        ]
        indices = [index_of[fragment.spec.name] for _, fragment in partition]
        self._fragment_parameters = torch.tensor(indices, dtype=torch.int32, device=device)
        slots = [slot for section in shards.layout.sections for slot in section.slots]
        self._left_out = {slot.spec.name for slot in slots if slot.group == NOT_UPDATED}
        counted = [
            fragment.spec.is_counted_on(self._coordinates) and fragment.spec.name not in self._left_out
            for _, fragment in partition
        ]
        self._counted = torch.tensor(counted, dtype=torch.float64, device=device)
        self._partition_gradients = [shards.reduced_gradient(bucket, fragment.within) for bucket, fragment in partition]
        self._places_by_home: dict[StateHome, list[int]] = {}  # of fragments among all
        for place, (bucket, _) in enumerate(partition):
            self._places_by_home.setdefault(shards.home(bucket), []).append(place)
        self._homes = list(dict.fromkeys(map(shards.home, self._buckets)))
        self._travelling: list[Arrival] = []  # updated weights on their way to the device

    def largest_buffer_bytes(self, *, on_device: bool) -> int:
        """The bytes that fit the gradients of one update, and one fragment's in the dtype of its norm's sum.

        on_device: those of buckets whose home is the device; else those of the others.
        """
        runs = (
            owned.within.numel * owned.run.master.element_size()
            for owned in self.runs
            if self._shards.home(owned.bucket).is_device == on_device
        )
        gradient = sum_dtype(self._shards.plan.gradient.dtype)
        fragments = (
            self._partition_gradients[place].numel() * gradient.itemsize
            for home, places in self._places_by_home.items()
            for place in places
            if home.is_device == on_device
        )
        return max((*runs, *fragments), default=0)

    def local_norms(self, buffers: Scratch) -> LocalNorms:
        """Compute norms over this rank's partitions: the same fragments in every stage, so stages agree to the bit."""
        norms = self._norms(buffers)
        # A replicated fragment is not multiplied by zero but left out: 0 * inf would be nan.  What overflows here
        # alone, in a copy that another rank counts, is an overflow all the same.
        square = torch.where(self._counted > 0, norms.square(), 0.0).sum()
        square = square + torch.where(torch.isfinite(norms), 0.0, torch.inf).sum()
        return LocalNorms(square, first_overflow(norms, self._fragment_parameters))

    def _norms(self, buffers: Scratch) -> Tensor:
        """Return the norms of all fragments, float64, each computed where its gradient lives."""
        device = self._counted.device
        if all(home.is_device for home in self._places_by_home):
            return fragment_norms(self._partition_gradients, device, buffers)
        norms = torch.zeros(len(self._partition_gradients), dtype=torch.float64, device=device)
        for home, places in self._places_by_home.items():
            gradients = [self._partition_gradients[place] for place in places]
            found = fragment_norms(gradients, home.device, home.scratch(buffers))
            norms[torch.tensor(places, device=device)] = found.to(device)
        return norms

    def counted_gradients(self) -> Iterator[StateFragment]:
        """Yield the gradients whose norms this rank counts in `local_norms`."""
        for bucket in self._buckets:
            for spec, start, stop, within in bucket.fragments_in(self._shards.partition(bucket)):
                if spec.is_counted_on(self._coordinates) and spec.name not in self._left_out:
                    gradient = self._shards.reduced_gradient(bucket, within)
                    yield StateFragment(spec, "gradient", start, stop, gradient)

    def apply(self, inputs: StepInputs, buffers: Scratch, absent: Mapping[str, Tensor]) -> None:
        """Take one optimizer step on the owned ranges; each bucket is published as soon as it is done.

        absent: flags, float32 without dimensions, by the parameters that may be left alone: 1 leaves one as it is, with
        its moments and its number of steps.
        Where a flag or an overflow may keep a torch optimizer from stepping, the host waits for the device.
        """
        if self._optimizer.skips_on_host and inputs.found_inf is not None and bool(inputs.found_inf.item()):
            return
        self.finish_copies()
        step = self._shards.optimizer_step
        advance(step, inputs)
        for name, flag in absent.items():
            self._separate(name)
            self._left_alone[name] += flag if inputs.found_inf is None else flag * (1.0 - inputs.found_inf)
        inputs = inputs.for_masters(self._shards.plan.optimizer.dtype)
        steps = {home: _at_home(home, step, inputs) for home in self._homes}
        for index, (bucket, _, run, parameter) in enumerate(self.runs):
            home = self._shards.home(bucket)
            at_home, memory = steps[home], home.scratch(buffers)
            with self._timers.measure("optimizer-inner-step"):
                if parameter:
                    self._update_parameter(index, at_home, absent.get(parameter), memory)
                else:
                    self._optimizer.update(index, run, at_home.step, at_home.inputs, buffers=memory)
            if index + 1 == len(self.runs) or self.runs[index + 1].bucket is not bucket:
                self._publish(bucket)

    def states_on_device(self) -> list[Tensor]:
        """Return the tensors of the device that hold the optimizer's state."""
        own = (
            tensor
            for index, owned in enumerate(self.runs)
            if self._shards.home(owned.bucket).is_device and not self._optimizer.moments
            for tensor in self._optimizer.state(index, owned.run).values()
        )
        return [*self._shards.moments_on_device(), *own]

    def finish_copies(self) -> None:
        """Wait until the host may write to master weights: those updated last have reached the device."""
        while self._travelling:
            self._travelling.pop().finish()

    def publish_masters(self, buckets: Iterable[Bucket]) -> None:
        """Copy the master weights of whole buckets to the working parameters of all ranks that have them."""
        for bucket in buckets:
            self._publish(bucket)

    def _publish(self, bucket: Bucket) -> None:
        arrival = self._shards.copy_master_to_working(bucket)
        self._publisher.publish(bucket, arrival)
        if not self._shards.home(bucket).is_device:
            self._travelling.append(arrival)

    def pieces(self, name: str, kind: str) -> Iterator[Piece]:
        """Yield what this rank owns of a trainable parameter's "master", "gradient", or optimizer state `kind`.

        Pieces come in order; there are none where the optimizer has no such state (yet).
        """
        for index, (bucket, within, run, _) in enumerate(self.runs):
            fragment = bucket.fragment_of(name, within)
            if fragment is None:
                continue
            ours = {"master": run.master, "gradient": run.gradient}
            found = ours[kind] if kind in ours else self._optimizer.state(index, run).get(kind)
            if found is not None:
                offset = fragment.within.start - within.start
                yield Piece(fragment.start, fragment.stop, found[offset : offset + fragment.numel])

    def optimizer_state(self, *, is_saved: bool) -> Iterator[StateFragment]:
        """Yield the owned ranges' state that a torch optimizer allocates itself, beside the moments in the shards.

        is_saved: only what this rank saves, which no other one counts; else all that it has.
        """
        for index, (bucket, within, run, _) in enumerate(self.runs):
            state = {} if self._optimizer.moments else self._optimizer.state(index, run)
            saved = self._shards.partition(bucket) if is_saved else within
            part = Range(max(saved.start, within.start), min(saved.stop, within.stop))
            if not state or part.start >= part.stop:
                continue
            for fragment in bucket.fragments_in(part):
                if is_saved and not fragment.spec.is_counted_on(self._coordinates):
                    continue
                start = fragment.within.start - within.start
                for kind, tensor in state.items():
                    piece = tensor[start : start + fragment.numel]
                    yield StateFragment(fragment.spec, kind, fragment.start, fragment.stop, piece)

    def numbers(self) -> OptimizerNumbers:
        """Return the numbers of the runs on this rank."""
        groups: dict[int, Mapping[str, float] | None] = {}
        parameters: dict[str, Mapping[str, float] | None] = {}
        for index, owned in enumerate(self.runs):
            if owned.run.group != NOT_UPDATED and not owned.parameter:
                groups.setdefault(owned.run.group, self._optimizer.numbers(index))
            elif owned.run.group != NOT_UPDATED and not self._optimizer.moments:
                parameters[owned.parameter] = self._optimizer.numbers(index)
        if self._optimizer.moments:
            step = float(self._shards.optimizer_step.item())
            parameters |= {name: {STEP: step - float(left.item())} for name, left in self._left_alone.items()}
        return OptimizerNumbers(groups, parameters)

    def start(self, numbers: OptimizerNumbers, *, num_steps: float) -> None:
        """Make the state of all runs, whose elements the caller fills; the optimizer has taken `num_steps` steps."""
        self._shards.optimizer_step.fill_(num_steps)
        for name in numbers.parameters:
            self._separate(name)
        for name, left in self._left_alone.items():
            own = numbers.parameters.get(name, {STEP: num_steps}) or {STEP: 0.0}
            left.fill_(num_steps - own.get(STEP, num_steps))
        for index, owned in enumerate(self.runs):
            if owned.run.group != NOT_UPDATED:
                of_group = numbers.groups.get(owned.run.group)
                self._optimizer.start(index, numbers.parameters.get(owned.parameter, of_group))

    def optimizer_bytes(self, *, on_device: bool) -> int:
        """Return the bytes of the state that a torch optimizer allocates itself; on_device: there, else elsewhere."""
        if self._optimizer.moments:
            return 0
        kept = (
            self._optimizer.state(index, owned.run)
            for index, owned in enumerate(self.runs)
            if self._shards.home(owned.bucket).is_device == on_device
        )
        return sum(tensor.nbytes for state in kept for tensor in state.values())

    def _update_parameter(self, index: int, at_home: _HomeStep, absent: Tensor | None, buffers: Scratch) -> None:
        """Update a run of one parameter, which has taken fewer steps than the others, unless the flag is 1."""
        owned, (step, inputs) = self.runs[index], at_home
        left = self._left_alone[owned.parameter]
        step = step - (left if left.device == step.device else left.to(step.device))
        if absent is not None:
            if self._optimizer.skips_on_host and bool(absent.item()):
                return
            absent = absent if absent.device == step.device else absent.to(step.device)
            found_inf = absent if inputs.found_inf is None else torch.maximum(inputs.found_inf, absent)
            inputs = inputs._replace(found_inf=found_inf)
        self._optimizer.update(index, owned.run, step, inputs, buffers=buffers)

    def _separate(self, name: str) -> None:
        """Divide the runs that a parameter lies in, so that its elements are runs of their own from here on."""
        if name in self._left_alone:
            return
        self._left_alone[name] = torch.zeros_like(self._shards.optimizer_step)
        divided: list[OwnedRun] = []
        for owned in self.runs:
            fragment = owned.bucket.fragment_of(name, owned.within)
            parts = [owned] if fragment is None else list(_divided(owned, fragment))
            if fragment is not None:
                self._optimizer.divide(len(divided), [part.run for part in parts])
            divided += parts
        self.runs = divided

    def _runs(self, bucket: Bucket, sub_group_numel: int) -> Iterator[OwnedRun]:
        shards = self._shards
        section = shards.layout.sections[bucket.section]
        for group, piece in section.group_runs(shards.owned(bucket)):
            for start in range(piece.start, piece.stop, sub_group_numel):
                within = Range(start, min(start + sub_group_numel, piece.stop))
                moments = {kind: shards.moment(kind, bucket, within) for kind in shards.moment_kinds}
                master, gradient = shards.master(bucket, within), shards.reduced_gradient(bucket, within)
                yield OwnedRun(bucket, within, Run(master, gradient, moments, group))


def _at_home(home: StateHome, step: Tensor, inputs: StepInputs) -> _HomeStep:
    """Return a step for the update of what lives in a home; the host waits for the inputs of its own."""
    return _HomeStep(step, inputs) if home.is_device else _HomeStep(step.to(home.device), inputs.to(home.device))


def _divided(owned: OwnedRun, fragment: Fragment) -> Iterator[OwnedRun]:
    """Yield the parts of a run before, in and behind one of its parameters, as far as they have elements."""
    (start, stop), cuts = owned.within, fragment.within
    for part, name in (
        (Range(start, cuts.start), ""),
        (cuts, fragment.spec.name),
        (Range(cuts.stop, stop), ""),
    ):
        if part.numel > 0:
            run = owned.run.part(part.start - start, part.stop - start)
            yield OwnedRun(owned.bucket, part, run, name or owned.parameter)
