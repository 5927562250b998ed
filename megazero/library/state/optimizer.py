"""The optimizer of an engine as user code sees it: a torch optimizer whose state is whole, though ranks partition it.

`param_groups` are the ones whose options every update reads.  `state_dict` gathers the state of one parameter after
the other, in host memory; it is a collective call where ranks partition the state.  `load_state_dict` takes such a
state, or that of a plain torch optimizer over the same parameters, at any stage.  torch's own hooks on the two methods
do this, so that the optimizer that a user has made stays the same object.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megazero.checkpoint.engine_state import numbers_of_all
from megazero.errors import Problem, UsageError, raise_problems
from megazero.library.optimizers import EngineOptimizer
from megazero.optim.inner import Elementwise
from megazero.parallel.param_spec import ParamSpec
from megazero.zero.engine import Engine
from megazero.zero.parameters.guard import handle_of
from megazero.zero.plan import Placement
from megazero.zero.update import STEP, OptimizerNumbers

_GROUP = "group."


class _Member(NamedTuple):
    """A parameter that the optimizer updates: its number in the optimizer's state_dict, its group's, and its spec."""

    number: int
    group: int
    spec: ParamSpec


def gathered_state(engine: Engine, spec: ParamSpec, kind: str) -> Tensor:
    """Return all of a trained parameter's "master" weights or optimizer state of this kind; a collective call.

    The result has the parameter's shape on this rank, and lies on the engine's device.  Adafactor's averages are those
    of the logical tensor.
    """
    if kind != "master" and (whole := engine.whole_state(spec.name).get(kind)) is not None:
        return whole.clone()
    dtype, device = engine.plan.optimizer.dtype, engine.optimizer_step.device
    full = torch.zeros(spec.numel, dtype=dtype, device=device)
    for start, stop, piece in engine.pieces(spec.name, kind):
        full[start:stop].copy_(piece)
    if engine.plan.optimizer.placement is Placement.PARTITIONED:
        engine.partition.all_reduce(full).wait()
    return full.view(spec.local_shape)


class _Configured(Optimizer):
    """A torch optimizer that only has the param groups of an optimizer that torch has not got."""

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(groups, {})


class OptimizerState:
    """The whole state of an engine's optimizer, and the torch optimizer through which user code reads and sets it."""

    def __init__(self, chosen: EngineOptimizer, engine: Engine) -> None:
        self._chosen, self._engine = chosen, engine
        self._specs = {slot.spec.name: slot.spec for section in engine.layout.sections for slot in section.slots}
        self._optimizer: Optimizer | None = None
        if chosen.given is not None:
            self._connect(chosen.given)

    @property
    def optimizer(self) -> Optimizer | None:
        """The torch optimizer, which never steps; None if the engine has none.

        A configuration's AdamW, LAMB or Adafactor gets one when it is first asked for.
        """
        if self._optimizer is None and self._chosen.exists:
            # torch imports its compiler, which takes a second, to make the first optimizer of a process.
            kind = torch.optim.AdamW if self._chosen.kind == "AdamW" else _Configured
            with torch._C.DisableTorchFunctionSubclass():
                self._connect(kind(self._chosen.groups))
        return self._optimizer

    def count_step(self) -> None:
        """Record that a step was taken, for torch's schedules, which warn when they step before their optimizer."""
        if self._optimizer is not None:
            vars(self._optimizer)["_opt_called"] = True

    def reset(self) -> None:
        """Set the state to that before the first step."""
        members = list(self._members())
        self._set({member: {} for member in members}, dict.fromkeys(members))

    def _connect(self, optimizer: Optimizer) -> None:
        self._optimizer, self._groups = optimizer, optimizer.param_groups
        optimizer.register_step_pre_hook(_refuse_to_step)
        optimizer.register_state_dict_post_hook(self._fill)
        optimizer.register_load_state_dict_pre_hook(self._take)
        optimizer.register_load_state_dict_post_hook(self._keep_groups)
        vars(optimizer)["add_param_group"] = _refuse_a_group

    # --- reading ------------------------------------------------------------------------------------------------------

    def _fill(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Set the state in a `state_dict` that torch has made, which has the param groups only; a collective call."""
        self._engine.check_updated("the optimizer's state_dict")
        numbers = numbers_of_all(self._engine, control=self._engine.mesh.control)
        step = float(self._engine.optimizer_step.item())
        state_dict["state"] = {}
        for member in self._members():
            own = self._numbers_of(member, numbers, step)
            if own is None:
                continue
            scalars = {name: torch.tensor(float(own[name])) for name in own if not name.startswith(_GROUP)}
            tensors = {kind: gathered_state(self._engine, member.spec, kind).cpu() for kind in self._kinds(member)}
            state_dict["state"][member.number] = scalars | tensors
            options = state_dict["param_groups"][member.group]
            options |= {name.removeprefix(_GROUP): own[name] for name in own if name.startswith(_GROUP)}

    def _numbers_of(self, member: _Member, numbers: OptimizerNumbers, step: float) -> Mapping[str, float] | None:
        """Return the numbers of a parameter's state, None before its first step; step: the optimizer's count."""
        if isinstance(self._engine.settings.optimizer, Elementwise):
            own = numbers.parameters.get(member.spec.name, numbers.groups.get(member.group))
        else:
            own = numbers.parameters.get(member.spec.name, {STEP: step})
        return None if own is None or own.get(STEP) == 0 else own

    def _members(self) -> Iterator[_Member]:
        """Yield the parameters that the optimizer updates, in the order of its param groups."""
        index = 0
        for group, options in enumerate(self._chosen.groups):
            for parameter in options["params"]:
                spec = self._specs[_name_of(parameter)]
                if spec.trainable:
                    yield _Member(index, group, spec)
                index += 1

    def _kinds(self, member: _Member) -> tuple[str, ...]:
        inner = self._engine.settings.optimizer
        if isinstance(inner, Elementwise):
            return inner.optimizer.state_names(member.group)
        return (*inner.moments, *self._engine.whole_state(member.spec.name))

    def _number_names(self, group: int) -> tuple[str, ...]:
        inner = self._engine.settings.optimizer
        return inner.optimizer.number_names(group) if isinstance(inner, Elementwise) else (STEP,)

    # --- setting ------------------------------------------------------------------------------------------------------

    def _take(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Set this rank's part of a given state; return the rest of `state_dict`, the param groups, for torch."""
        saved = state_dict["param_groups"]
        sizes = [[len(group["params"]) for group in groups] for groups in (saved, optimizer.param_groups)]
        if sizes[0] != sizes[1]:
            given = f"a state of {len(saved)} param groups with {sizes[0]} parameters"
            rule = "a state is loaded into an optimizer with the same param groups"
            raise UsageError(Problem(given, rule, f"{len(sizes[1])} groups with {sizes[1]}"))
        keys = [key for group in saved for key in group["params"]]
        state = {m: dict(state_dict["state"].get(keys[m.number], {})) for m in self._members()}
        raise_problems(UsageError, self._problems(state))
        self._set(state, {m: self._given_numbers(m, entries, saved[m.group]) for m, entries in state.items()})
        return {**state_dict, "state": {}}

    def _given_numbers(
        self, member: _Member, entries: Mapping[str, Any], options: Mapping[str, Any]
    ) -> dict[str, float] | None:
        """Return the numbers in a parameter's given state, and in the given options of its group; None without state.

        A state without entries is that before the first step, also where the optimizer keeps nothing.
        """
        names = self._number_names(member.group)
        if not entries and (names or self._kinds(member)):
            return None
        return {
            name: float(options[name.removeprefix(_GROUP)] if name.startswith(_GROUP) else entries[name])
            for name in names
        }

    def _problems(self, state: Mapping[_Member, Mapping[str, Any]]) -> Iterator[Problem]:
        for member, entries in state.items():
            name, kinds = member.spec.name, self._kinds(member)
            wanted = {*kinds, *(each for each in self._number_names(member.group) if not each.startswith(_GROUP))}
            found = {each for each, value in entries.items() if value is not None}
            if entries and found != wanted:
                given = f"a state of {', '.join(sorted(found)) or 'nothing'} for parameter {name}"
                yield Problem(given, "the state is that of an optimizer of the same class", ", ".join(sorted(wanted)))
            elif entries:
                yield from self._value_problems(member, entries)

    def _value_problems(self, member: _Member, entries: Mapping[str, Any]) -> Iterator[Problem]:
        whole = self._engine.whole_state(member.spec.name)
        for kind in self._kinds(member):
            shape = tuple(whole[kind].shape) if kind in whole else member.spec.local_shape
            if tuple(entries[kind].shape) != shape:
                given = f"{kind} of shape {list(entries[kind].shape)} for parameter {member.spec.name}"
                yield Problem(given, "state has the shape of its parameter", str(list(shape)))

    def _set(
        self, state: Mapping[_Member, Mapping[str, Any]], numbers: Mapping[_Member, Mapping[str, float] | None]
    ) -> None:
        """Set what this rank owns of the parameters' state; numbers None: to that before the first step."""
        most = max((own.get(STEP, 0.0) for own in numbers.values() if own is not None), default=0.0)
        groups: dict[int, Mapping[str, float] | None] = {}
        for group in {member.group for member in state}:
            values = {str(numbers[member]): numbers[member] for member in state if member.group == group}
            counts = Counter(str(numbers[member]) for member in state if member.group == group)
            groups[group] = values[counts.most_common(1)[0][0]]
        if isinstance(self._engine.settings.optimizer, Elementwise):
            apart = {m.spec.name: own for m, own in numbers.items() if own != groups[m.group]}
        else:  # the optimizer counts the most steps, and each parameter those that have left it alone
            apart = {m.spec.name: own for m, own in numbers.items() if own is None or own[STEP] != most}
        self._engine.start_optimizer(OptimizerNumbers(groups, apart), num_steps=most)
        for member, entries in state.items():
            for kind, tensor in self._engine.whole_state(member.spec.name).items():
                tensor.copy_(entries[kind] if entries else torch.zeros_like(tensor))
            for kind in self._kinds(member):
                for start, stop, piece in self._engine.pieces(member.spec.name, kind):
                    if entries:
                        piece.copy_(entries[kind].reshape(-1)[start:stop])
                    else:
                        piece.zero_()

    def _keep_groups(self, optimizer: Optimizer) -> None:
        """Move loaded options to the param groups that updates read; torch has made new ones."""
        for group, loaded in zip(self._groups, optimizer.param_groups, strict=True):
            group.update(loaded)
        optimizer.param_groups = self._groups


def _name_of(parameter: nn.Parameter) -> str:
    handle = handle_of(parameter)
    assert handle is not None, "the optimizer's parameters are the engine's"
    return handle.name


def _refuse_to_step(optimizer: Optimizer, _arguments: Any, _options: Any) -> None:
    given = f"step() of the {type(optimizer).__name__} that an engine was initialized with"
    rule = "every rank updates its share of the optimizer's state, together with the others"
    raise UsageError(Problem(given, rule, "engine.step()"))


def _refuse_a_group(_group: Any) -> None:
    rule = "the optimizer's state is laid out over the ranks for the parameters that it had at initialize"
    raise UsageError(Problem("add_param_group of an engine's optimizer", rule, "all param groups before initialize"))
