"""Finds what a user has done to an engine's parameters between two steps.

Values that a user writes (`load_state_dict`, `fill_`, `nn.init`, a swap for a moving average, `parameter.data = ...`)
are copied to the master weights before the next step, or before anything reads the master weights.  What an engine
cannot follow is refused before the next step: a parameter that was replaced, added, moved to another device or number
format, frozen or thawed.  A partitioned parameter's values are guarded (`guard.py`), so only those that are whole on
every rank are compared:

    torch's version counter   rises with every write in place, and with `set_`
    writes to `.data`         torch gives each `.data` a counter of its own, which would be lost: in mixed precision a
                              parameter returns views of one tensor, whose counter is read (`WatchedParameter`); in
                              full precision the parameter is its own master weight, where such a write arrives anyway
    the address               changes with `parameter.data = ...`, and where memory is moved, as by `share_memory_`

Ranks must agree, so a hash of the names that each has found written travels with the step's figures.  If all ranks have
written the same parameters, each takes data-parallel rank 0's values; else the step is refused on all ranks, on a GPU
at the next step, since no host waits for the figures of a step in which it has found nothing.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from megazero.comm.mesh import Mesh
from megazero.errors import Problem, UsageError, raise_problems
from megazero.memory.host_copy import HostCopy
from megazero.zero.layout import Section, Slot
from megazero.zero.parameters.guard import WatchedValues, handle_of
from megazero.zero.shards import Shards

_DATA: Any = vars(torch._C.TensorBase)["data"]
_VERSION, _REQUIRES_GRAD, _VALUES = attrgetter("_version"), attrgetter("requires_grad"), methodcaller("values")
_HASHES = 1 << 18  # the sum of their squares over 16,384 ranks is exact in float64
_AGAIN = "engine.close(), then megazero.initialize of the changed model"


class WatchedParameter(nn.Parameter):
    """A parameter with an owner of whose `.data` all writes are counted, however often it is read and assigned."""

    @property
    def data(self) -> Tensor:
        """The values without autograd, a view that shares a version counter with the others that are returned."""
        handle = handle_of(self)
        if handle is None:
            return super().data
        with torch.inference_mode(False):  # a tensor made for inference has no version counter
            values = super().data
            if handle.values is None:
                handle.values = WatchedValues(values)
            elif not handle.values.tensor.is_set_to(values):  # `set_` has moved the parameter
                handle.values.assign(values)
        found: Tensor = handle.values.tensor.detach()
        return found

    @data.setter
    def data(self, value: Tensor) -> None:
        _DATA.__set__(self, value)
        handle = handle_of(self)
        if handle is not None and handle.values is not None:
            with torch.inference_mode(False):
                handle.values.assign(_DATA.__get__(self) if value.is_inference() else value.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary parameter, which has no owner."""
        if id(self) not in memo:
            copied = self.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(copied, self.requires_grad)
        found: nn.Parameter = memo[id(self)]
        return found


class _Marks(NamedTuple):
    """Counters that change when parameters are written: by parameter in order, and the writes to `.data` by name."""

    versions: list[int]
    addresses: list[int]
    are_contiguous: list[bool]
    data_writes: dict[str, int]


class WrittenParameters:
    """The parameters of one engine as they were after the last look at them, and those written since the last step."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], shards: Shards, mesh: Mesh) -> None:
        """Watch the parameters, which have handles; parameters: those that a user can write, by name."""
        self._model = model
        self._shards = shards
        self._mesh = mesh
        self._parameters = parameters
        self._ids = {id(parameter) for parameter in parameters.values()}
        self._requires_grad = [parameter.requires_grad for parameter in parameters.values()]
        self._modules: list[nn.Module] = []
        self._tables: list[Mapping[str, object]] = []
        self._structure: list[int] = []
        if parameters:
            self._remember_structure()
        self._places: dict[str, tuple[Section, Slot]] = {
            slot.spec.name: (section, slot)
            for section in shards.layout.sections
            for slot in section.slots
            if not section.partitioned and slot.spec.name in parameters
        }
        self._whole = [parameters[name] for name in self._places]
        if any(parameter.is_meta for parameter in self._whole):
            self._places, self._whole = {}, []  # they have no addresses
        self._shapes = {name: parameters[name].shape for name in self._places}
        for name, parameter in zip(self._places, self._whole, strict=True):
            self._point(name)
            if shards.plan.has_separate_master and type(parameter) is nn.Parameter:
                parameter.__class__ = WatchedParameter
        watched = [handle_of(parameter) for parameter in self._whole if isinstance(parameter, WatchedParameter)]
        self._handles = [handle for handle in watched if handle is not None]
        self._seen = self._read()
        self._unusable: frozenset[str] = frozenset()  # of another form than the engine's
        self._pending: set[str] = set()  # written since the last step
        self._figures: HostCopy | None = None  # the last step's, not read yet

    def check(self) -> None:
        """Raise UsageError for parameters that are not the engine's any more; find those that are written."""
        if not self._parameters:
            return
        with torch._C.DisableTorchFunctionSubclass():  # partitioned parameters would take microseconds each
            requires_grad = list(map(_REQUIRES_GRAD, self._parameters.values()))
        problems = [*self._replaced()]
        if requires_grad != self._requires_grad:
            problems.extend(self._frozen_or_thawed(requires_grad))
        problems.extend(self._find())
        raise_problems(UsageError, problems)

    def before_forward(self) -> None:
        """Let parameters that the user has moved lie in the engine's memory again, with what was written to them.

        Gradients have a parameter's strides.  Parameters that have another form now are left to `check`.
        """
        if self._shards.has_resident_gradients and list(map(Tensor.data_ptr, self._whole)) != self._seen.addresses:
            self._find()

    def find(self) -> None:
        """Copy what this rank's user has written to the owned master weights.

        Raises UsageError for parameters that have another form now.
        """
        raise_problems(UsageError, self._find())

    def _find(self) -> Collection[Problem]:
        now, seen = self._read(), self._seen
        if now == seen and not self._unusable:
            return ()
        written = [
            name
            for index, name in enumerate(self._places)
            if now.versions[index] != seen.versions[index]
            or now.addresses[index] != seen.addresses[index]
            or now.are_contiguous[index] != seen.are_contiguous[index]
            or now.data_writes.get(name) != seen.data_writes.get(name)
            or name in self._unusable
        ]
        problems = {name: problem for name in written for problem in self._problems(name)}
        for name in written:
            if name not in problems:
                self._move_back(name)
                self._shards.store_value(self._places[name][0], name)
        self._seen, self._unusable = self._read(), frozenset(problems)
        self._pending.update(written)
        return problems.values()

    def accept(self, name: str) -> None:
        """Take the present values of a parameter, which are the same on every rank, for not written."""
        if name in self._places:
            self.find()
            self._pending.discard(name)

    def forget(self, names: Iterable[str] | None) -> None:
        """Take the present values of parameters, those of a checkpoint, for not written; names: without it, of all."""
        self._pending.difference_update(self._places if names is None else names)

    def figures(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return what `agree` needs summed over all ranks, float64 without dimensions."""
        names = "\n".join(sorted(self._pending))
        mark = float(crc32(names.encode()) % _HASHES + 1) if names else 0.0
        return tuple(torch.full((), value, dtype=torch.float64, device=device) for value in (mark, mark * mark))

    def check_and_agree(self) -> None:
        """Find what is written, and agree on it at once, before master weights are saved; a collective call.

        Raises UsageError as `check` and `agree` do.
        """
        self.check()
        sums = torch.stack(self.figures(torch.device("cpu")))
        self._mesh.control.all_reduce_scalars(sums).wait()
        self.agree(sums.unbind())

    def agree(self, sums: Sequence[Tensor]) -> None:
        """Take data-parallel rank 0's values of what every rank has written; raise UsageError if ranks differ in that.

        sums: those of `figures`.  A collective call where something is written.
        """
        figures = HostCopy(sums)
        earlier, self._figures = self._figures, None
        if earlier is not None:
            self._check_same(earlier)
        if sums[0].is_cpu:
            self._check_same(figures)
        else:
            self._figures = figures
        if self._pending and self._is_same(figures):
            self._take_first_values()

    def close(self) -> None:
        """Make the parameters ordinary ones again."""
        for parameter in self._whole:
            is_watched = type(parameter) is WatchedParameter
            if is_watched:
                parameter.__class__ = nn.Parameter

    def _read(self) -> _Marks:
        values = ((handle.name, handle.values) for handle in self._handles)
        return _Marks(
            list(map(_VERSION, self._whole)),
            list(map(Tensor.data_ptr, self._whole)),
            list(map(Tensor.is_contiguous, self._whole)),
            {name: one.writes for name, one in values if one is not None and one.writes},
        )

    def _view(self, name: str) -> Tensor:
        section, slot = self._places[name]
        return self._shards.flat(section)[slot.start : slot.stop].view(self._shapes[name])

    def _point(self, name: str) -> None:
        """Make a parameter the memory of its slot, as a storage of its own: what saves it writes that and no more."""
        view = self._view(name)
        start = view.storage_offset() * view.element_size()
        storage = view.untyped_storage()[start : start + view.nbytes]
        empty = torch.empty(0, dtype=view.dtype, device=view.device)
        self._parameters[name].data = empty.set_(storage, 0, view.shape, view.stride())
        handle = handle_of(self._parameters[name])
        if handle is not None:
            handle.values = None  # those of other memory

    def _move_back(self, name: str) -> None:
        """Copy a parameter that lies elsewhere to the engine's memory, and let it lie there."""
        parameter, view = self._parameters[name], self._view(name)
        if view.numel() and (parameter.data_ptr() != view.data_ptr() or parameter.stride() != view.stride()):
            with torch.no_grad():
                view.copy_(parameter.detach().clone())
            self._point(name)

    def _take_first_values(self) -> None:
        axis = self._mesh.axis("dp")
        names = sorted(self._pending)
        if axis.size > 1:
            works = [axis.broadcast(view.view(-1), 0) for name in names if (view := self._view(name)).numel()]
            for work in works:
                work.wait()
            for name in names:
                self._shards.store_value(self._places[name][0], name)
        self._pending.clear()

    def _is_same(self, figures: HostCopy) -> bool:
        """Return True if all ranks have given the same mark: only then is the square's mean that of the mean."""
        total, squares = (int(figure) for figure in figures.read())
        return total * total == self._mesh.world.size * squares

    def _check_same(self, figures: HostCopy) -> None:
        if self._is_same(figures):
            return
        here = f"on rank {self._mesh.world.rank}: {', '.join(sorted(self._pending)) or 'none'}"
        given = f"parameters written since the last step differ from rank to rank; {here}"
        rule = "every rank writes the same parameters, of which each then takes data-parallel rank 0's values"
        raise UsageError(Problem(given, rule, "load_state_dict, copy_, nn.init, ... on every rank, then engine.step()"))

    def _remember_structure(self) -> None:
        self._modules = list(self._model.modules())  # which keeps their ids from being used again
        self._tables = [table for module in self._modules for table in (module._parameters, module._modules)]
        self._structure = self._ids_below()

    def _ids_below(self) -> list[int]:
        """Return the ids of all parameters and modules that the modules have by name."""
        return list(map(id, chain.from_iterable(map(_VALUES, self._tables))))

    def _replaced(self) -> Iterator[Problem]:
        """Yield the parameters of the model that the engine does not own."""
        if self._ids_below() == self._structure:
            return
        others = [name for name, parameter in self._model.named_parameters() if id(parameter) not in self._ids]
        for name in others:
            is_known = name in self._parameters
            given = f"parameter {name}, which was {'replaced' if is_known else 'added'} after megazero.initialize"
            rule = "an engine trains the parameters that it was given"
            copied = "load_state_dict without assign=True, or parameter.copy_(...) under torch.no_grad(); or "
            yield Problem(given, rule, f"{copied if is_known else ''}{_AGAIN}")
        if not others:
            self._remember_structure()

    def _frozen_or_thawed(self, requires_grad: Sequence[bool]) -> Iterator[Problem]:
        for name, now, before in zip(self._parameters, requires_grad, self._requires_grad, strict=True):
            if now != before:
                given = f"parameter {name} with requires_grad {now}, which was {before} at megazero.initialize"
                rule = "an engine trains the parameters that required a gradient when it was made"
                yield Problem(given, rule, f"requires_grad_({before}) before engine.step(); or {_AGAIN}")

    def _problems(self, name: str) -> Iterator[Problem]:
        parameter, section = self._parameters[name], self._places[name][0]
        mine, wanted = _form(parameter.shape, parameter), _form(self._shapes[name], self._shards.flat(section))
        if mine != wanted:
            given = f"parameter {name}, which has become a tensor {mine}"
            rule = f"an engine trains its parameters in the form that it gave them: {wanted}"
            legal = "model.to(...) back to it before engine.step(); other formats: the configuration's precision"
            yield Problem(given, rule, legal)


def _form(shape: Sequence[int], tensor: Tensor) -> str:
    return f"{list(shape)} of {tensor.dtype} on {tensor.device}"
