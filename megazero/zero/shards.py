"""The persistent flat tensors of this rank, and the views on which everything else works.

Every `nn.Parameter` is a view of its section's flat tensor.  Where the section is replicated, that tensor is the
working parameters; where it is partitioned, its memory exists only while the unit is gathered (`gather.py` fills and
empties it), and what persists is this rank's *working shard*.  Resident gradients have the section's shape, with
`.grad` preset to views.  What is partitioned (working shards, reduced gradients of leased buckets, master weights,
moments) lies bucket after bucket in one flat tensor each; `owned` gives the range of a bucket.

With contiguous gradients, resident ones and the reduced shard are blocks of one arena, as large as all of them (ZeRO,
section 6.3).

What the optimizer updates lives in the home of its bucket (`memory/homes.py`): such tensors, at home in host memory,
are read and written there, and meet those of the device in copies only.  States at home in files
(`memory/file_states.py`) are in host memory a sub-group at a time.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megazero.config.engine_sections import UNLIMITED
from megazero.memory.arena import Arena
from megazero.memory.copies import ARRIVED, Arrival
from megazero.memory.file_states import FileSlice, FileState, FileStates
from megazero.memory.homes import DeviceHome, StateHome
from megazero.memory.ledger_interface import AnyLedger, NullLedger
from megazero.optim.block_moments import BlockElements, BlockMoment
from megazero.optim.factors import Factors
from megazero.optim.inner import NOT_UPDATED
from megazero.parallel.param_spec import ParamSpec, StateFragment
from megazero.zero.encoded_shards import EncodedShard, EncodedSlice
from megazero.zero.gradients.gradient_guard import may_have
from megazero.zero.late_update import LateUpdate
from megazero.zero.layout import Bucket, FlatLayout, Fragment, Range, Reduction, Section, Slot
from megazero.zero.offloaded import StateKind
from megazero.zero.plan import Home, Lifetime, ModelStateBytes, Placement, ZeroPlan

# At least the elements of a processor's vectors, of any number format, that an update takes at once.
_VECTOR_NUMEL = 64

FirstValue = Callable[[ParamSpec, nn.Parameter], Tensor]
StateSource = Tensor | FileSlice | EncodedSlice | BlockElements


def value_of_parameter(spec: ParamSpec, parameter: nn.Parameter) -> Tensor:
    """Return the first value of an ordinary parameter: what it holds."""
    return parameter.detach()


class SubGroup(NamedTuple):
    """The elements of a bucket that this rank updates at once; `within` is their range of the bucket's section."""

    bucket: Bucket
    within: Range


@dataclass(frozen=True)
class _Owned:
    """The optimizer's states of all buckets with one home, flat tensors [elements of these buckets that a rank owns].

    home: the memory in which the states are updated.
    gradient: reduced gradients, without elements where they stay in resident memory.
    moments, blocks: the optimizer's, those that are numbers and those that are stored in 8 bits.
    """

    home: StateHome
    gradient: Tensor | FileState
    master: Tensor | FileState | None
    moments: Mapping[str, Tensor | FileState]
    blocks: Mapping[str, BlockMoment]

    @property
    def stored_moments(self) -> tuple[Tensor | FileState, ...]:
        """The tensors that hold the moments: of one in 8 bits its codes and its maxima."""
        return (*self.moments.values(), *(part for moment in self.blocks.values() for part in moment.tensors))

    @property
    def files(self) -> list[FileState]:
        """The states that an update changes, as far as they are in files."""
        return [state for state in (self.master, *self.moments.values()) if isinstance(state, FileState)]

    @property
    def gradient_file(self) -> FileState | None:
        """The reduced gradients, if they are in a file."""
        return self.gradient if isinstance(self.gradient, FileState) else None


class Shards:
    """The state of one rank, allocated according to the plan, with the parameters as views of it."""

    def __init__(
        self,
        plan: ZeroPlan,
        layout: FlatLayout,
        rank: int,
        parameters: Mapping[str, nn.Parameter],
        *,
        first_value: FirstValue = value_of_parameter,
        moments: Sequence[str] = ("exp_avg", "exp_avg_sq"),
        code_values: Mapping[str, Tensor] = MappingProxyType({}),
        kinds_in_files: Sequence[str] = ("exp_avg", "exp_avg_sq"),
        ledger: AnyLedger | None = None,
        gradients_in_arena: bool = True,
        host: StateHome | None = None,
        files: FileStates | None = None,
        parameter_files: FileStates | None = None,
        sub_group_numel: int = UNLIMITED,
        late: LateUpdate | None = None,
        check_back: Callable[[str, Collection[StateKind]], None] = lambda call, needed: None,
    ) -> None:
        """Allocate the state and copy the first values to it.

        host: the home in host memory, where the plan has one.  files, parameter_files: the homes in files, of the
        optimizer's states and of partitions of parameters, likewise.
        sub_group_numel: the most elements that are updated at once.  late: the updates that run beside the next step.
        check_back: raises UsageError for a call that needs state of kinds which have left the device for a while.
        moments: the kinds that the optimizer keeps beside the master weights.  code_values: of those in 8 bits, the
        values of their codes.  kinds_in_files: those of the states in files, where an optimizer that would keep its
        state itself has it here.

        first_value is called for one parameter at a time, and returns all elements of this rank's tensor, in any shape.
        gradients_in_arena: whether reduced gradients are blocks of one arena, or tensors of their own.
        """
        self.plan = plan
        self.layout = layout
        self.rank = rank
        self.ledger = ledger or NullLedger()
        self._parameters = parameters
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.device = next(iter(parameters.values())).device
        buckets = [bucket for section in layout.sections for bucket in section.buckets]
        self._partitions = [bucket.partition(rank) for bucket in buckets]
        self._is_resident = plan.gradient.lifetime is Lifetime.RESIDENT
        is_whole = plan.optimizer.placement is Placement.REPLICATED
        self._owned = [bucket.range for bucket in buckets] if is_whole else self._partitions
        self.check_back = check_back
        self.late = late or LateUpdate()
        self.device_home = DeviceHome(self.device)
        self._homes: Mapping[Home, StateHome] = {
            Home.DEVICE: self.device_home,
            Home.HOST: host or self.device_home,
            Home.FILE: host or self.device_home,
        }
        self._files, self._parameter_files = files, parameter_files
        self._home_of = self._choose_homes()
        self._sub_groups = {
            bucket.index: list(
                _sub_groups(
                    layout.sections[bucket.section],
                    bucket,
                    self.owned(bucket),
                    max(sub_group_numel, layout.rules.trained_block),
                    grain=layout.rules.trained_block,
                )
            )
            for bucket in layout.trainable_buckets
        }
        self._offsets = self._offsets_by_bucket()
        self._working_shards: dict[int, Tensor | FileState | EncodedShard] = {}
        self._first_elements: dict[int, int] = {}  # of sections in the shards that have several
        self._make_parameter_file()
        self._flats = [self._attach_parameters(section, first_value) for section in layout.sections]
        owned = {home: self._numel_at(home) for home in dict.fromkeys(self._home_of.values())}
        self.gradient_arena = self._make_gradient_arena(owned.get(Home.DEVICE, 0)) if gradients_in_arena else None
        self._resident_views: dict[str, Tensor] = {}
        self._resident_gradients = self._make_resident_gradients()
        self._moment_kinds, self._code_values = tuple(moments), code_values
        self._states = {
            home: self._make_states(home, numel, kinds_in_files if home is Home.FILE else moments)
            for home, numel in owned.items()
        }
        self.optimizer_step = torch.zeros((), dtype=torch.float32, device=self.device)
        self.copy_working_to_master()

    def owned(self, bucket: Bucket) -> Range:
        """Return the range of the section of which this rank stores optimizer state."""
        return self._owned[bucket.index]

    def loaded(self, bucket: Bucket) -> Range:
        """Return the range that a checkpoint fills on this rank: the owned one, of frozen parameters the stored one."""
        section = self.layout.sections[bucket.section]
        if section.trainable:
            return self.owned(bucket)
        return self.partition(bucket) if section.partitioned else bucket.range

    def partition(self, bucket: Bucket) -> Range:
        """Return this rank's partition of a bucket: norms are computed on it even where state is replicated."""
        return self._partitions[bucket.index]

    def flat(self, section: Section) -> Tensor:
        """Return the tensor [section.numel] that the section's parameters are views of; released, it has no memory."""
        return self._flats[section.index]

    def replace_flat(self, section: Section) -> None:
        """Make the parameters views of a new, empty storage; tensors that autograd has saved retain the old one."""
        with torch.inference_mode(False):  # it may be a forward for inference that ends, and the next one is not
            self._flats[section.index] = self._make_hollow_flat(section)

    def move_back(self, section: Section, slot: Slot) -> bool:
        """Let a gathered parameter that user code has moved (`parameter.data = ...`, `set_`) lie in its section again.

        The section gets its values.  Returns False if it has another form, so that its values are lost.
        """
        parameter = self._parameters[slot.spec.name]
        view = self.flat(section)[slot.start : slot.stop].view(self._shapes[slot.spec.name])
        if parameter.data_ptr() == view.data_ptr() and parameter.stride() == view.stride():
            return True
        fits = (parameter.shape, parameter.dtype, parameter.device) == (view.shape, view.dtype, view.device)
        with torch.no_grad(), torch.inference_mode(False):
            if fits:
                view.copy_(parameter.detach().clone())  # it may share memory with what is written
            parameter.data = view
        return fits

    def working(self, bucket: Bucket, within: Range) -> Tensor:
        """Return a view of working parameters [numel of within]; in a partitioned section, of this rank's part only."""
        shard = self._working_shards.get(bucket.section)
        if shard is None:
            return self._flats[bucket.section][within.start : within.stop]
        assert not isinstance(shard, EncodedShard), "what is stored encoded has no view"
        return shard[self._place_in_shard(bucket, within)]

    def encoded_row(self, bucket: Bucket) -> Tensor | None:
        """Return this rank's partition of a bucket as it is stored encoded, uint8; None if it is stored as numbers."""
        shard = self._working_shards[bucket.section]
        return shard.row(self._number_in_section(bucket)) if isinstance(shard, EncodedShard) else None

    def is_encoded(self, section: Section) -> bool:
        """Return True if this rank's partitions of the section are stored encoded."""
        is_frozen = section.partitioned and not section.trainable
        return self.plan.frozen is not None and is_frozen and section.dtype.is_floating_point

    def close_encoded(self, *, discards: bool = False) -> None:
        """Store what has been written to `wanted_state` of encoded partitions, or discard it."""
        for shard in self._working_shards.values():
            if isinstance(shard, EncodedShard):
                shard.close(discards=discards)

    def _number_in_section(self, bucket: Bucket) -> int:
        return bucket.index - self.layout.sections[bucket.section].buckets[0].index

    def _place_in_shard(self, bucket: Bucket, within: Range) -> slice:
        """Return the place of a range in the working shard of a partitioned section."""
        first = self._first_elements.get(bucket.section, 0)
        offset = first + bucket.start // bucket.partitions - self.partition(bucket).start
        return slice(offset + within.start, offset + within.stop)

    def partition_bytes(self, section: Section) -> int:
        """Return the bytes of this rank's partition of a partitioned section, as it is stored."""
        shard = self._working_shards[section.index]
        if isinstance(shard, EncodedShard):
            return shard.nbytes
        return section.numel // self.layout.rules.partitions * section.dtype.itemsize

    def has_partitions_in_file(self, section: Section) -> bool:
        """Return True if this rank's partitions of the section's buckets are at home in a file."""
        return isinstance(self._working_shards.get(section.index), FileState)

    def fetch_partition(self, bucket: Bucket) -> bool:
        """Begin to read this rank's partition of a bucket, if it is in a file; return False if no buffer is free."""
        shard = self._working_shards[bucket.section]
        if not isinstance(shard, FileState):
            return True
        return shard.fetch(self._place_in_shard(bucket, self.partition(bucket)))

    def forget_fetches(self) -> None:
        """Let buffers be free of partitions that have been fetched for gathers that did not come."""
        if self._parameter_files is not None:
            self._parameter_files.forget_fetches()

    def resident_gradient(self, piece: Bucket | Reduction, within: Range) -> Tensor:
        """Return a view of a resident section's gradients: unreduced, or after the reduction reduced."""
        return self._resident_gradients[piece.section][within.start : within.stop]

    def resident_gradient_of(self, name: str) -> Tensor:
        """Return a parameter's unreduced gradient, a view in its shape."""
        return self._resident_views[name]

    def whole_gradient_of(self, name: str) -> Tensor:
        """Return a parameter's gradient after reduction, a view in its shape, where every rank has all of it."""
        if self._is_resident:
            return self._resident_views[name]
        found = ((section, slot) for section in self.layout.sections for slot in section.slots)
        section, slot = next((section, slot) for section, slot in found if slot.spec.name == name)
        if not slot.spec.numel:  # its section may have no bucket
            return torch.empty_like(self._parameters[name], dtype=self.plan.gradient.dtype)
        first = section.buckets[0]
        start = self._offsets[first.index] + slot.start  # a section's buckets lie one behind the other
        return self._state(first).gradient[start : start + slot.spec.numel].view(self._parameters[name].shape)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients that this rank stores."""
        for flat in self._resident_gradients.values():
            flat.detach().mul_(factor)
        for bucket in self.layout.trainable_buckets:
            for part in () if self.reduces_in_place(bucket) else self.gradient_parts(bucket, self.owned(bucket)):
                self.reduced_gradient(bucket, part).detach().mul_(factor)

    def sub_groups(self, bucket: Bucket) -> list[SubGroup]:
        """Return the parts of a bucket that this rank updates one after the other."""
        return self._sub_groups[bucket.index]

    def is_in_files(self, bucket: Bucket) -> bool:
        """Return True if a bucket's master weights and moments are at home in files."""
        return self._home_of[bucket.index] is Home.FILE

    def fetch(self, sub_group: SubGroup) -> bool:
        """Begin to read what the optimizer keeps in files of a sub-group; return False if buffers are wanting."""
        place, states = self._place(sub_group.bucket, sub_group.within), self._state(sub_group.bucket)
        gradient = states.gradient_file
        return all(file.fetch(place) for file in states.files) and (gradient is None or gradient.fetch(place))

    def store(self, sub_group: SubGroup, arrival: Arrival) -> None:
        """Begin to write what an update has changed in files of a sub-group; arrival: that of copies of it."""
        place, states = self._place(sub_group.bucket, sub_group.within), self._state(sub_group.bucket)
        for file in states.files:
            file.store(place, arrival)
        if (gradient := states.gradient_file) is not None:
            gradient.leave(place, ARRIVED)

    def store_moments(self, sub_group: SubGroup) -> None:
        """Begin to write the moments in files of a sub-group, the only states that have changed."""
        place, states = self._place(sub_group.bucket, sub_group.within), self._state(sub_group.bucket)
        for moment in states.moments.values():
            assert isinstance(moment, FileState), "states of a bucket are in files together"
            moment.store(place, ARRIVED)
        for unchanged in (states.master, states.gradient):
            if isinstance(unchanged, FileState):
                unchanged.leave(place, ARRIVED)

    def updated_parameters(self) -> list[Factors]:
        """Return the matrices of the parameters that the optimizer updates, as far as they have elements."""
        trained = (section for section in self.layout.sections if section.trainable)
        return [
            Factors(slot.spec, tuple(self._shapes[slot.spec.name]), slot.group)
            for section in trained
            for slot in section.slots
            if slot.group != NOT_UPDATED and slot.spec.numel
        ]

    def forget_state_fetches(self) -> None:
        """Let buffers be free of states that have been fetched for an update that did not come."""
        if self._files is not None:
            self._files.forget_fetches()

    def home(self, bucket: Bucket) -> StateHome:
        """Return the memory in which a bucket's master weights and moments are updated, from gradients there."""
        return self._states[self._home_of[bucket.index]].home

    def reduces_in_place(self, bucket: Bucket) -> bool:
        """Return True if a bucket's reduced gradients stay in the resident memory of the unreduced ones."""
        return self._is_resident and self._home_of[bucket.index] is Home.DEVICE

    def gradient_parts(self, bucket: Bucket, within: Range) -> Iterator[Range]:
        """Yield the parts of an owned range whose reduced gradients are a tensor each: in files, those of a block."""
        return iter((within,)) if self._state(bucket).gradient_file is None else self._parts(bucket, within)

    def reduced_gradient(self, bucket: Bucket, within: Range) -> Tensor:
        """Return a view, at home, of the reduced gradients of a part that this rank stores after reduction.

        Those in a file come to memory, and stay there as long as they are referred to.
        """
        found = self.gradient_source(bucket, within)
        return found if isinstance(found, Tensor) else found.view()

    def gradient_source(self, bucket: Bucket, within: Range) -> Tensor | FileSlice:
        """Return what `reduced_gradient` does, but of gradients in a file what brings them to memory."""
        if self.reduces_in_place(bucket):
            return self.resident_gradient(bucket, within)
        return _elements(self._state(bucket).gradient, self._place(bucket, within))

    def fetch_gradient(self, bucket: Bucket) -> None:
        """Begin to read the first of a bucket's reduced gradients, if they are in a file and a buffer is free."""
        if (file := self._state(bucket).gradient_file) is not None:
            file.fetch(self._place(bucket, self.sub_groups(bucket)[0].within))

    def load_gradient(self, bucket: Bucket, within: Range, into: Tensor) -> None:
        """Copy the reduced gradients of an owned range to the device, whose later work runs after that."""
        for part in self.gradient_parts(bucket, within):
            place = into[part.start - within.start : part.stop - within.start]
            arrival = self.home(bucket).load(place, self.reduced_gradient(bucket, part))
            arrival.wait()
            if (file := self._state(bucket).gradient_file) is not None:
                file.leave(self._place(bucket, part), arrival)

    def store_gradient(self, bucket: Bucket, within: Range, source: Tensor) -> None:
        """Copy reduced gradients of an owned range from the device; the host waits."""
        for part in self.gradient_parts(bucket, within):
            place = source[part.start - within.start : part.stop - within.start]
            self.home(bucket).store(self.reduced_gradient(bucket, part), place).finish()

    def new_gradient(self, bucket: Bucket, part: Range) -> Tensor:
        """Return a view of all of a part's reduced gradients, which are about to be written: no file is read."""
        file = self._state(bucket).gradient_file
        return self.reduced_gradient(bucket, part) if file is None else file.overwrite(self._place(bucket, part))

    def keep_gradient(self, bucket: Bucket, part: Range, arrival: Arrival) -> None:
        """Let the memory be free that a part's reduced gradients have been copied from, at home, with this arrival.

        The device's later work waits; to write them to a file, the host does.
        """
        arrival.wait()
        if (file := self._state(bucket).gradient_file) is not None:
            arrival.finish()
            file.store(self._place(bucket, part), ARRIVED)

    def master(self, bucket: Bucket, within: Range) -> Tensor:
        """Return the master weights of an owned range, at home; at full precision on the device the working ones."""
        master = self._state(bucket).master
        return self.working(bucket, within) if master is None else master[self._place(bucket, within)]

    @property
    def moment_kinds(self) -> tuple[str, ...]:
        """The kinds of state that the optimizer keeps beside the master weights."""
        return self._moment_kinds

    def kinds_of(self, bucket: Bucket) -> tuple[str, ...]:
        """Return the kinds of state of a bucket that are stored here as numbers beside the master weights."""
        return tuple(self._state(bucket).moments)

    def moment(self, kind: str, bucket: Bucket, within: Range) -> Tensor:
        """Return one of the optimizer's moments of an owned range, at home: a view, or what `close_blocks` stores."""
        states, place = self._state(bucket), self._place(bucket, within)
        return states.blocks[kind].opened(place) if kind in states.blocks else states.moments[kind][place]

    def blocks(self, bucket: Bucket, within: Range) -> dict[str, BlockMoment]:
        """Return the moments of an owned range that are stored in 8 bits, views at home."""
        place = self._place(bucket, within)
        return {kind: moment[place] for kind, moment in self._state(bucket).blocks.items()}

    def close_blocks(self) -> None:
        """Store what has been written to moments that are stored in 8 bits."""
        for states in self._states.values():
            for moment in states.blocks.values():
                moment.close()

    def outgoing(self, bucket: Bucket, whole: Tensor) -> tuple[Tensor, Arrival]:
        """Return this rank's partition of a partitioned bucket on the device, and its arrival there.

        whole: the bucket's memory on the device, in which the partition may be put at its place.
        """
        part, shard = self.partition(bucket), self._working_shards[bucket.section]
        place = whole[part.start - bucket.start : part.stop - bucket.start]
        found, arrival = self.parameter_home.bring(self.working(bucket, part), place)
        if isinstance(shard, FileState):
            shard.leave(self._place_in_shard(bucket, part), arrival)
        return found, arrival

    def reset_resident_gradients(self) -> None:
        """Zero resident gradients, and make every `.grad` its view again (a user's zero_grad() removes them).

        Gradients that autograd does not add in place are not zeroed: the first write replaces them.
        """
        for index, flat in self._resident_gradients.items():
            for gap in _not_written(self.layout.sections[index]):
                flat[gap.start : gap.stop].zero_()
            self._preset_gradients(self.layout.sections[index])

    @property
    def has_resident_gradients(self) -> bool:
        """True if gradients lie in flat tensors that `.grad` points into."""
        return bool(self._resident_views)

    def copy_working_to_master(self) -> None:
        """Copy working parameters to master weights, where they are two tensors."""
        for bucket in self.layout.trainable_buckets:
            if self._state(bucket).master is not None:
                for part in self._parts(bucket, self.owned(bucket)):
                    self.master(bucket, part).copy_(self.working(bucket, part))

    def copy_master_to_working(self, sub_group: SubGroup) -> Arrival:
        """Begin to copy a sub-group from master weights to working parameters, if they are two tensors.

        Nothing may change the master weights until the arrival.
        """
        bucket, within = sub_group
        if self._state(bucket).master is None:
            return ARRIVED
        return self.copy_to_working(bucket, within, self.master(bucket, within))

    def copy_to_working(self, bucket: Bucket, within: Range, values: Tensor) -> Arrival:
        """Begin to copy values [numel of within], which are at the bucket's home, to working parameters.

        Nothing may change them until the arrival.
        """
        home, shard = self.home(bucket), self._working_shards.get(bucket.section)
        if isinstance(shard, FileState):  # all sub-groups of the bucket are copied
            working = shard.overwrite(self._place_in_shard(bucket, within))
        else:
            working = self.working(bucket, within)
        is_partitioned = self.layout.sections[bucket.section].partitioned
        target = self.parameter_home if is_partitioned else self.device_home
        if target.is_device:
            return home.load(working, values)
        if home.is_device:
            narrowed = values.to(working.dtype)
            target.store(working, narrowed).finish()  # before it is freed
        else:
            working.copy_(values)
        return ARRIVED

    def store_partition(self, bucket: Bucket) -> None:
        """Begin to write this rank's partition of a bucket, to which master weights are copied, if it is in a file."""
        shard = self._working_shards.get(bucket.section)
        if isinstance(shard, FileState):
            shard.store(self._place_in_shard(bucket, self.partition(bucket)), ARRIVED)

    def moment_source(self, kind: str, bucket: Bucket, within: Range) -> Tensor | FileSlice:
        """Return a moment of an owned range of a sub-group, which comes to memory when it is asked for."""
        return _elements(self._state(bucket).moments[kind], self._place(bucket, within))

    def owned_state(self, coordinates: Mapping[str, int], *, with_moments: bool = True) -> Iterator[StateFragment]:
        """Yield the state that the rank at these coordinates saves: its partitions of parameters that it counts."""
        for section in self.layout.sections:
            for bucket in section.buckets:
                for part in self._parts(bucket, self.partition(bucket)):
                    for fragment in bucket.fragments_in(part):
                        if fragment.spec.is_counted_on(coordinates):
                            yield from self._state_of(bucket, fragment, with_moments, is_written=False)

    def wanted_state(self, *, with_moments: bool = True) -> Iterator[StateFragment]:
        """Yield the state that a checkpoint must fill: all state on this rank that isn't computed from the rest.

        What is written to encoded partitions is stored by `close_encoded`.
        """
        self.close_encoded(discards=True)  # what a load that failed has left
        for section in self.layout.sections:
            for bucket in section.buckets:
                for part in self._parts(bucket, self.loaded(bucket)):
                    for fragment in bucket.fragments_in(part):
                        yield from self._state_of(bucket, fragment, with_moments, is_written=True)

    def _state_of(
        self, bucket: Bucket, fragment: Fragment, with_moments: bool, *, is_written: bool
    ) -> Iterator[StateFragment]:
        spec, start, stop, within = fragment
        if not spec.trainable:
            shard = self._working_shards.get(bucket.section)
            working: StateSource
            if isinstance(shard, FileState):
                working = FileSlice(shard, self._place_in_shard(bucket, within))
            elif isinstance(shard, EncodedShard):
                first, number = self.partition(bucket).start, self._number_in_section(bucket)
                row = within.start - first, within.stop - first
                working = EncodedSlice(shard, number, *row, is_written=is_written)
            else:
                working = self.working(bucket, within)
            yield StateFragment(spec, "weight", start, stop, working)
            return
        states, place = self._state(bucket), self._place(bucket, within)
        master = self.working(bucket, within) if states.master is None else _elements(states.master, place)
        yield StateFragment(spec, "weight", start, stop, master)
        for kind in self.moment_kinds if with_moments else ():
            moment: StateSource
            if kind in states.blocks:
                moment = BlockElements(states.blocks[kind], place, is_written)
            else:
                moment = _elements(states.moments[kind], place)
            yield StateFragment(spec, kind, start, stop, moment)

    def kinds_of_weights(self, section: Section, *, is_written: bool) -> set[StateKind]:
        """Return the kinds of state that hold a section's weights as they are saved; is_written: in which they change.

        They are the master weights, or where those are no tensors of their own the working parameters.
        """
        have_master = [section.trainable and self._state(bucket).master is not None for bucket in section.buckets]
        kinds = {StateKind.MASTERS} if any(have_master) else set()
        if section.partitioned and (is_written or not all(have_master)):
            kinds.add(StateKind.PARTITIONS)
        return kinds

    def tensors_on_device(self) -> dict[StateKind, list[Tensor]]:
        """Return the tensors of the device that hold master weights, partitions of parameters, and of gradients."""
        states = self._states.get(Home.DEVICE)
        is_leased = self.plan.gradient.lifetime is Lifetime.LEASED
        return {
            StateKind.MASTERS: [states.master] if states is not None and isinstance(states.master, Tensor) else [],
            StateKind.PARTITIONS: self._shards_in_memory if self.parameter_home.is_device else [],
            StateKind.GRADIENTS: [states.gradient]
            if states is not None and is_leased and isinstance(states.gradient, Tensor)
            else [],
        }

    def moments_on_device(self) -> list[Tensor]:
        """Return the flat tensors of the optimizer's moments whose home is the device."""
        states = self._states.get(Home.DEVICE)
        moments = () if states is None else states.stored_moments
        return [moment for moment in moments if isinstance(moment, Tensor)]

    def model_state_bytes(self, home: Home = Home.DEVICE, *, optimizer_bytes: int = 0) -> ModelStateBytes:
        """Return the bytes at a home of persistent flat tensors, without gathered parameters.

        optimizer_bytes: those of an optimizer's own state there.
        """
        states = [state for owner, state in self._states.items() if owner is home]
        in_memory = Home.HOST if self.plan.parameter.home is Home.FILE else self.plan.parameter.home
        parameters = self._shards_in_memory if home is in_memory else []
        files = {shard for shard in self._working_shards.values() if isinstance(shard, FileState)}
        gradients = [
            state.gradient
            for owner, state in self._states.items()
            if home is (Home.HOST if owner is Home.FILE and state.gradient_file is None else owner)
        ]
        if home is Home.DEVICE:
            parameters += [self._flats[section.index] for section in self.layout.sections if not section.partitioned]
            gradients += self._resident_gradients.values()
        return ModelStateBytes(
            parameters=sum(map(_nbytes, parameters)) + sum(file.nbytes for file in files if home is Home.FILE),
            # An arena's storage is shared, and may have left the device.
            gradients=sum(flat.nbytes for flat in gradients if _nbytes(flat)),
            master=sum(_nbytes(state.master) for state in states if state.master is not None),
            moments=sum(_nbytes(moment) for state in states for moment in state.stored_moments) + optimizer_bytes,
        )

    def _attach_parameters(self, section: Section, first_value: FirstValue) -> Tensor:
        """Copy a section's values to where they are stored; the module's own tensors are freed one by one."""
        if section.partitioned:
            if self.is_encoded(section):
                assert self.plan.frozen is not None
                numels = [self.partition(bucket).numel for bucket in section.buckets]
                encoded = EncodedShard(self.plan.frozen, numels, section.dtype, self.parameter_home)
                self._working_shards[section.index] = encoded
                self.ledger.tag(encoded.stored, "parameters")
            elif section.index not in self._working_shards:
                numel = section.numel // self.layout.rules.partitions
                shard = self._working_shards[section.index] = self.parameter_home.zeros(numel, section.dtype)
                self.ledger.tag(shard, "parameters")
            for slot in section.slots:
                value = first_value(slot.spec, self._parameters[slot.spec.name]).reshape(-1)
                self._store_working(section, slot.spec.name, value)
                del value  # one parameter at a time is whole
            return self._make_hollow_flat(section)
        flat = self._zeros(section.numel, section.dtype)
        self.ledger.tag(flat, "parameters")
        for slot in section.slots:
            flat[slot.start : slot.stop].copy_(first_value(slot.spec, self._parameters[slot.spec.name]).reshape(-1))
            self._point(slot, flat)
        return flat

    def store_value(self, section: Section, name: str) -> None:
        """Store a gathered parameter's present value in the working shard, and in master weights where it differs.

        A master weight that rounds to the value is left: it has digits that the working dtype cannot represent.
        """
        self.check_back(f"a change of parameter {name}", self.kinds_of_weights(section, is_written=True))
        self.late.finish()
        slot = next(slot for slot in section.slots if slot.spec.name == name)
        value = self.flat(section)[slot.start : slot.stop]
        if section.partitioned:
            self._store_working(section, name, value)
        for bucket in section.buckets if section.trainable else ():
            parts = self._parts(bucket, self.owned(bucket)) if self._state(bucket).master is not None else ()
            for part in parts:
                if (fragment := bucket.fragment_of(name, part)) is not None:
                    master = self.master(bucket, fragment.within)
                    new = value[fragment.start : fragment.stop].to(master.device)
                    master.copy_(torch.where(master.to(new.dtype) == new, master, new.to(master.dtype)))
                    if (late := self.late.weights.get(bucket.index)) is not None:
                        first = self.owned(bucket).start
                        late.values[fragment.within.start - first : fragment.within.stop - first].copy_(new)

    def _store_working(self, section: Section, name: str, value: Tensor) -> None:
        """Write this rank's partition of a parameter's value to the working shard."""
        for bucket in section.buckets:
            fragment = bucket.fragment_of(name, self.partition(bucket))
            if fragment is None:
                continue
            mine, shard = value[fragment.start : fragment.stop], self._working_shards[section.index]
            if isinstance(shard, EncodedShard):
                start = fragment.within.start - self.partition(bucket).start
                shard.write(self._number_in_section(bucket), start, mine.to(section.dtype))
            else:
                self.working(bucket, fragment.within).copy_(mine)

    def _make_hollow_flat(self, section: Section) -> Tensor:
        """Make a flat tensor with the section's parameters as its views, and no memory."""
        flat = self._empty(section.numel, section.dtype)
        for slot in section.slots:
            self._point(slot, flat)
        flat.untyped_storage().resize_(0)
        self.ledger.tag(flat, "gathered_parameters")
        self.ledger.resized(flat)
        return flat

    def _point(self, slot: Slot, flat: Tensor) -> None:
        parameter = self._parameters[slot.spec.name]
        parameter.data = flat[slot.start : slot.stop].view(parameter.shape)

    def _make_resident_gradients(self) -> dict[int, Tensor]:
        row = self.plan.gradient
        flats = {}
        for section in self.layout.sections:
            if not section.trainable:
                continue
            if self._is_resident:
                flat = flats[section.index] = self._zero_gradients(section.numel)
                for slot in section.slots:
                    shape = self._parameters[slot.spec.name].shape
                    view = flat[slot.start : slot.stop].view(shape)
                    self._resident_views[slot.spec.name] = view
                self._preset_gradients(section)
            elif row.lifetime is Lifetime.LOOSE:
                self._set_gradient_dtype(section, row.dtype)
        return flats

    def _preset_gradients(self, section: Section) -> None:
        """Set every `.grad` that autograd fills to its view, since autograd adds in place where a `.grad` exists."""
        self._set_gradient_dtype(section, self.plan.gradient.dtype)
        for slot in section.slots:
            parameter, preset = self._parameters[slot.spec.name], self._resident_views[slot.spec.name]
            wanted = preset if slot.spec.accumulates_in_place else None
            if parameter.grad is not wanted and (wanted is None or may_have(parameter, wanted)):
                parameter.grad = wanted

    def _set_gradient_dtype(self, section: Section, dtype: torch.dtype) -> None:
        for slot in section.slots:
            parameter = self._parameters[slot.spec.name]
            if dtype != parameter.grad_dtype:
                parameter.grad = None
                parameter.grad_dtype = dtype

    def _make_gradient_arena(self, owned: int) -> Arena:
        sections = sum(section.numel for section in self.layout.sections if section.trainable)
        numel, itemsize = sections if self._is_resident else owned, self.plan.gradient.itemsize
        alignment = self.layout.rules.alignment * itemsize  # the arena's blocks are multiples of it
        return Arena(numel * itemsize, self.device, category="gradients", ledger=self.ledger, alignment=alignment)

    def _zero_gradients(self, numel: int) -> Tensor:
        """Allocate zeroed memory for resident or reduced gradients, for as long as the shards exist."""
        if self.gradient_arena is None:
            flat = self._zeros(numel, self.plan.gradient.dtype)
            self.ledger.tag(flat, "gradients")
            return flat
        block = self.gradient_arena.allocate(numel, self.plan.gradient.dtype, movable=False)
        assert block is not None, "the arena is as large as all gradients"
        return block.tensor.zero_()

    @property
    def parameter_home(self) -> StateHome:
        """The home of partitioned parameters; of those in files the memory to which they come."""
        return self._homes[self.plan.parameter.home]

    @property
    def _shards_in_memory(self) -> list[Tensor]:
        shards = self._working_shards.values()
        stored = (shard.stored if isinstance(shard, EncodedShard) else shard for shard in shards)
        return [shard for shard in stored if isinstance(shard, Tensor)]

    def _make_parameter_file(self) -> None:
        """Make the file of each number format's partitions, of those sections that have no place in host memory."""
        in_memory, partitions = 0, self.layout.rules.partitions
        starts: dict[torch.dtype, list[int]] = {}
        sections: dict[torch.dtype, list[Section]] = {}
        for section in self.layout.sections if self._parameter_files is not None else ():
            numel = section.numel // partitions
            if not (section.partitioned and numel) or in_memory + numel <= self.plan.max_parameters_in_host:
                in_memory += numel if section.partitioned else 0
                continue
            of_dtype = starts.setdefault(section.dtype, [0])
            self._first_elements[section.index] = of_dtype[-1]
            of_dtype += [of_dtype[-1] + bucket.stop // partitions for bucket in section.buckets]
            sections.setdefault(section.dtype, []).append(section)
        for dtype, of_dtype in starts.items():
            assert self._parameter_files is not None
            file = self._parameter_files.allocate("parameters", dtype, of_dtype)
            self._working_shards |= {section.index: file for section in sections[dtype]}

    def _choose_homes(self) -> dict[int, Home]:
        """Return the homes of trainable buckets by index: of every part of the model, about the same share in each."""
        homes, total = {}, 0
        at = dict.fromkeys(Home, 0)  # the elements that have each home
        for bucket in self.layout.trainable_buckets:
            total += bucket.numel
            home = max(Home, key=lambda home: self.plan.share_at(home) * total - at[home])
            at[home] += bucket.numel
            homes[bucket.index] = home
        return homes

    def _parts(self, bucket: Bucket, within: Range) -> Iterator[Range]:
        """Yield the parts of an owned range whose states are tensors each: sub-groups, where they are in files."""
        if self._home_of.get(bucket.index) is not Home.FILE:
            yield within
            return
        for _, (start, stop) in self.sub_groups(bucket):
            part = Range(max(start, within.start), min(stop, within.stop))
            if part.numel > 0:
                yield part

    def _numel_at(self, home: Home) -> int:
        buckets = self.layout.trainable_buckets
        return sum(self.owned(bucket).numel for bucket in buckets if self._home_of[bucket.index] is home)

    def _make_states(self, home: Home, numel: int, moments: Sequence[str]) -> _Owned:
        """Allocate the optimizer's states of `numel` elements at home."""
        memory, dtype = self._homes[home], self.plan.optimizer.dtype
        if home is Home.FILE:
            assert self._files is not None, "the plan has a home in files"
            groups = (group for bucket in self.layout.trainable_buckets for group in self.sub_groups(bucket))
            sizes = (group.within.numel for group in groups if self.is_in_files(group.bucket))
            starts = list(accumulate(sizes, initial=0))
            states = {kind: self._files.allocate(kind, dtype, starts) for kind in ("master", *moments)}
            gradient: Tensor | FileState
            if self.plan.gradient.home is Home.FILE:
                gradient = self._files.allocate("gradient", self.plan.gradient.dtype, starts)
            else:
                gradient = memory.zeros(numel, self.plan.gradient.dtype)
            return _Owned(memory, gradient, states.pop("master"), states, {})
        if home is Home.DEVICE:
            gradient = self._zero_gradients(0 if self._is_resident else numel)
        else:
            gradient = memory.zeros(numel, self.plan.gradient.dtype)
        master = memory.zeros(numel, dtype) if self.plan.separates_master(home) else None
        if master is not None:
            self.ledger.tag(master, "master")
        own = {kind: memory.zeros(numel, dtype) for kind in moments if kind not in self._code_values}
        blocks = {kind: self._zero_blocks(memory, numel, kind) for kind in moments if kind in self._code_values}
        for moment in (*own.values(), *(part for each in blocks.values() for part in each.tensors)):
            self.ledger.tag(moment, "moments")
        return _Owned(memory, gradient, master, own, blocks)

    def _zero_blocks(self, memory: StateHome, numel: int, kind: str) -> BlockMoment:
        maxima = memory.zeros(numel // self.layout.rules.trained_block, torch.float32)
        return BlockMoment(memory.zeros(numel, torch.uint8), maxima, self._code_values[kind].to(memory.device))

    def _state(self, bucket: Bucket) -> _Owned:
        return self._states[self._home_of[bucket.index]]

    def _offsets_by_bucket(self) -> dict[int, int]:
        """Return by bucket the offset from an element's place in its section to that in the flat tensors of state."""
        offsets, positions = {}, dict.fromkeys(Home, 0)
        for bucket in self.layout.trainable_buckets:
            owned, home = self.owned(bucket), self._home_of[bucket.index]
            offsets[bucket.index] = positions[home] - owned.start
            positions[home] += owned.numel
        return offsets

    def _place(self, bucket: Bucket, within: Range) -> slice:
        offset = self._offsets[bucket.index]
        return slice(offset + within.start, offset + within.stop)

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def _zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)


def _not_written(section: Section) -> Iterator[Range]:
    """Yield the ranges between the parameters whose gradients autograd does not add in place."""
    start = 0
    for slot in section.slots:
        if not slot.spec.accumulates_in_place:
            if start < slot.start:
                yield Range(start, slot.start)
            start = slot.stop
    if start < section.numel:
        yield Range(start, section.numel)


def _sub_groups(section: Section, bucket: Bucket, owned: Range, most: int, *, grain: int) -> Iterator[SubGroup]:
    """Cut what a rank owns of a bucket into parts of at most `most` elements.

    A run of elements treated alike is cut behind whole vectors of the processor's, so that no element's update is
    rounded otherwise than in the whole run, and behind whole blocks of `grain` elements.
    """
    grain, start = math.lcm(grain, _VECTOR_NUMEL if most >= _VECTOR_NUMEL else 1), owned.start
    for _, run in section.group_runs(owned):
        position = run.start
        while run.stop - start > most:
            position += (start + most - position) // grain * grain
            yield SubGroup(bucket, Range(start, position))
            start = position
    if start < owned.stop:
        yield SubGroup(bucket, Range(start, owned.stop))


def _elements(state: Tensor | FileState, place: slice) -> Tensor | FileSlice:
    return FileSlice(state, place) if isinstance(state, FileState) else state[place]


def _nbytes(state: Tensor | FileState) -> int:
    return state.nbytes if isinstance(state, FileState) else state.untyped_storage().nbytes()
