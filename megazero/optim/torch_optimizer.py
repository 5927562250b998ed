"""Any elementwise torch optimizer on the flat pieces of master weights that ZeRO leaves with a rank.

The user's optimizer, the *template*, was made for whole parameters and never steps.  Each *run* - a contiguous piece of
a flat tensor whose elements share a parameter group - gets an optimizer of the same class and options of its own, over
a parameter that aliases the run.  So runs are updated one by one, each with a gradient in leased memory.  Options stay
in the template: a value that a learning-rate scheduler writes into its groups acts on the next step.  Hooks on its step
are not called.

That is the same update only if the optimizer is *elementwise*: an element's new value depends on this element's value,
gradient and state alone, and on *numbers* that are the same for all elements (a step count).  `check_elementwise` tries
it: a small matrix, updated whole and as two flat pieces, has to come out the same, also when the pieces'
state is saved and restored on the way.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from megazero.errors import CheckpointError, ConfigError, Problem, raise_problems

# Entries of a param group that name parameters; everything else is an option.
_PARAMETERS = ("params", "param_names")
_PLAIN = (bool, int, float, complex, str, bytes, tuple, torch.dtype, type(None))
_GROUP = "group."
_MISSING = object()
_RULE = "ZeRO updates flat pieces of parameters, so the optimizer has to treat every element by itself"
_LEGAL = (
    "torch's SGD, Adam, AdamW, RMSprop, Adagrad, NAdam, RAdam, Adamax, Adadelta, Rprop, ASGD or Adafactor, or an"
    " elementwise one of yours; for moments in 8 bits, optimizer.type AdamW8bit in the configuration"
)

# The trial.  Its learning rate is not the template's, which a warm-up may have set to zero: no weight would change.
_TRIAL_RATE = 0.05
_TRIAL_STEPS = 4
_TRIAL_SHAPE = (6, 5)
_TRIAL_CUT = 13
_TOLERANCE = 1e-12
_LARGE_NUMEL = 1 << 14  # optimizers with 8-bit states leave parameters of less than 4,096 elements at full precision


class FlatRun(NamedTuple):
    """A contiguous run of elements treated alike: a one-dimensional view of master weights, its param group's index."""

    master: Tensor
    group: int


class RunState(NamedTuple):
    """An optimizer's state of one run; empty before the first step.

    tensors: by name, of the run's shape ("exp_avg", "momentum_buffer").
    numbers: by name, equal in all runs of a group ("step"); "group.X" is entry X of the param group, where some
    optimizers count.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, float]


class TorchOptimizer:
    """A torch optimizer over flat runs of master weights, in place of the parameters it was made for."""

    def __init__(self, template: Optimizer) -> None:
        """Take the user's optimizer; raise `ConfigError` if it has stepped already or is not elementwise."""
        self.template = template
        self._attributes = {name: value for name, value in vars(template).items() if isinstance(value, _PLAIN)}
        raise_problems(ConfigError, self._problems())
        self._group_of = {p: index for index, group in enumerate(template.param_groups) for p in group["params"]}
        self._groups: tuple[int, ...] = ()
        self._pieces: tuple[_Piece, ...] = ()

    def group_of(self, parameter: nn.Parameter) -> int | None:
        """Return the index of the parameter's group; None for one that the optimizer does not update."""
        return self._group_of.get(parameter)

    def bind(self, runs: Sequence[FlatRun]) -> None:
        """Set the runs that are updated, whose index is their position in `runs`; frees the template's state."""
        assert not self._pieces, "an optimizer is bound once"
        assert all(run.master.dim() == 1 for run in runs), "runs are one-dimensional"
        self._groups = tuple(run.group for run in runs)
        self._pieces = tuple(_Piece(self._recipe(run.group, run.master.device), run.master) for run in runs)
        self.template.state.clear()

    def divide(self, index: int, masters: Sequence[Tensor]) -> None:
        """Replace run `index` by adjacent runs, whose master weights these are, each with its part of the state."""
        state, start, parts = self._pieces[index].state(), 0, []
        for master in masters:
            part = _Piece(self._recipe(self._groups[index], master.device), master)
            within = slice(start, start + master.numel())
            part.restore(RunState({name: tensor[within] for name, tensor in state.tensors.items()}, state.numbers))
            parts.append(part)
            start += master.numel()
        self._pieces = (*self._pieces[:index], *parts, *self._pieces[index + 1 :])
        self._groups = (*self._groups[:index], *(self._groups[index] for _ in parts), *self._groups[index + 1 :])

    def step_run(
        self, index: int, gradient: Tensor, *, lr: float | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        """Update run `index` in place; the other runs stay untouched.

        gradient: unscaled and clipped, of the run's shape and dtype; it is not retained, but may be written to.
        lr: this step's rate; None takes that of the options.  options: those of the group at this step; None takes
        those that the template's group has now.
        """
        piece = self._pieces[index]
        group = self.template.param_groups[self._groups[index]] if options is None else options
        piece.set_options(_options(group, gradient.device))
        if lr is not None:
            piece.set_options({"lr": lr})
        piece.step(gradient)
        # torch's schedulers warn when they step before the optimizer they were made for.
        vars(self.template)["_opt_called"] = True

    def attach(self, index: int, master: Tensor, state: Mapping[str, Tensor]) -> None:
        """Let run `index` have its elements, and its state's tensors once it has a state, in memory that has come.

        state: by name, for all of the optimizer's groups.
        """
        self._pieces[index].attach(master, state)

    def detach(self, index: int, state: Mapping[str, Tensor]) -> None:
        """Leave the memory of `attach`, with the run's state in it; the run's tensors have no elements then."""
        self._pieces[index].detach(state)

    def state_of(self, index: int) -> RunState:
        """Return the state of a run; its tensors are the optimizer's own."""
        return self._pieces[index].state()

    def numbers(self, index: int) -> dict[str, float] | None:
        """Return the numbers of a run's state, None before its first step."""
        piece = self._pieces[index]
        return piece.state().numbers if piece.has_state else None

    def start(self, index: int, numbers: Mapping[str, float] | None) -> None:
        """Give a run the state of an optimizer with these numbers; None: that of a new optimizer.

        The state's tensors are zero, for the caller to fill.
        """
        piece = self._pieces[index]
        piece.restore(RunState({}, {}) if numbers is None else RunState(piece.zeros(), dict(numbers)))

    def set_state(self, index: int, state: RunState) -> None:
        """Replace a run's state by a copy of `state`; raises `CheckpointError` if it is another optimizer's."""
        self._pieces[index].restore(state)

    def state_names(self, group: int) -> tuple[str, ...]:
        """Return the names of the tensors that a run of this group has from its first step on."""
        return _trial_entries(self._recipe(group, torch.device("cpu")), torch.zeros(0)).tensors

    def number_names(self, group: int) -> tuple[str, ...]:
        """Return the names of the numbers that a run of this group has from its first step on."""
        return _trial_entries(self._recipe(group, torch.device("cpu")), torch.zeros(0)).numbers

    def _recipe(self, group: int, device: torch.device) -> "_Recipe":
        """Return the recipe of a run's optimizer in this group, with the template's current options."""
        options = _options(self.template.param_groups[group], device)
        return _Recipe(type(self.template), options, self._attributes)

    def _problems(self) -> list[Problem]:
        recipes = [self._recipe(index, torch.device("cpu")) for index in range(len(self.template.param_groups))]
        # Groups often differ in the rate alone, which the trial replaces.
        distinct: list[_Recipe] = []
        for recipe in map(_Recipe.at_trial_rate, recipes):
            if not any(_same(recipe.options, other.options) for other in distinct):
                distinct.append(recipe)
        reasons = dict.fromkeys(reason for reason in map(_reason_against, distinct) if reason is not None)
        if reasons:
            return [_refusal(type(self.template), reason) for reason in reasons]
        if not any(_has_stepped(self.template, index, recipe) for index, recipe in enumerate(recipes)):
            return []
        given = f"an optimizer {type(self.template).__name__} that has state already"
        rule = "the optimizer's state is partitioned from its first step on"
        legal = "an optimizer that has not stepped yet; its state is loaded later (engine.optimizer)"
        return [Problem(given, rule, legal)]


def check_elementwise(optimizer_class: type[Optimizer], options: Mapping[str, Any]) -> Problem | None:
    """Return the problem of this class, with these options of a param group, on flat pieces; None if it works."""
    reason = _reason_against(_Recipe(optimizer_class, _options(options, torch.device("cpu")), {}).at_trial_rate())
    return None if reason is None else _refusal(optimizer_class, reason)


def _refusal(optimizer_class: type[Optimizer], reason: str) -> Problem:
    return Problem(f"optimizer {optimizer_class.__name__}: {reason}", _RULE, _LEGAL)


def _options(group: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the options of a param group for master weights on `device`; "capturable" is for accelerators only."""
    options = {name: value for name, value in group.items() if name not in _PARAMETERS}
    if device.type == "cpu" and options.get("capturable"):
        options["capturable"] = False
    return options


def _same(one: Any, other: Any) -> bool:
    """Return True if two options are equal; tensors equal themselves only, since they change in place."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    return bool(one == other)


@dataclass(frozen=True)
class _Recipe:
    """The class, options and attributes from which an optimizer like the user's is made over one tensor.

    options: of its param group.  attributes: further ones of the optimizer, for constructors with more arguments.
    """

    kind: type[Optimizer]
    options: Mapping[str, Any]
    attributes: Mapping[str, Any]

    @cached_property
    def _arguments(self) -> dict[str, Any]:
        """The options that the constructor takes."""
        accepted = inspect.signature(self.kind.__init__).parameters
        return {name: value for name, value in self.options.items() if name in accepted}

    def build(self, parameter: nn.Parameter) -> Optimizer:
        made = cast(Callable[..., Optimizer], self.kind)([{"params": [parameter], **self.options}], **self._arguments)
        vars(made).update(self.attributes)
        return made

    def at_trial_rate(self) -> "_Recipe":
        """Return the recipe with the trial's learning rate, unless the optimizer has no learning rate option."""
        if self.options.get("lr") is None:
            return self
        return replace(self, options={**self.options, "lr": _TRIAL_RATE})


class _StateEntries(NamedTuple):
    """The entries of an optimizer's state for one parameter.

    tensors: names of the entries of the parameter's shape.  numbers: names of those that are one number.
    values: all entries, by name.
    """

    tensors: tuple[str, ...]
    numbers: tuple[str, ...]
    values: Mapping[str, Any]


class _Piece:
    """An optimizer like the user's over one tensor, which it updates in place."""

    def __init__(self, recipe: _Recipe, master: Tensor) -> None:
        self._recipe = recipe
        self._parameter = nn.Parameter(master.detach())
        self._start()

    @property
    def values(self) -> Tensor:
        return self._parameter.detach()

    @property
    def has_state(self) -> bool:
        return self._has_state

    def zeros(self) -> dict[str, Tensor]:
        """Return a scalar zero, which `restore` broadcasts, for every tensor of the state, by name."""
        return {name: self.values.new_zeros(()) for name in self._entries.tensors}

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Set the options that changed; entries in which the optimizer itself counts are not overwritten."""
        for name, value in options.items():
            given = self._given.get(name, _MISSING)
            if given is not value and (given is _MISSING or not _same(given, value)):
                self._group[name] = self._given[name] = value

    def step(self, gradient: Tensor) -> None:
        self._parameter.grad = gradient
        self._optimizer.step()
        self._parameter.grad = None
        self._has_state = True

    def attach(self, master: Tensor, state: Mapping[str, Tensor]) -> None:
        self._parameter.data = master
        if self._has_state:
            self._optimizer.state[self._parameter].update({name: state[name] for name in self._entries.tensors})
        else:
            self._start()  # some optimizers make their state at once, of the parameter's shape

    def detach(self, state: Mapping[str, Tensor]) -> None:
        own = self._optimizer.state[self._parameter]
        for name in self._entries.tensors if self._has_state else ():
            assert own[name].dtype == state[name].dtype, "state in files has the master weights' format"
            if own[name] is not state[name]:  # the optimizer has made it anew
                state[name].copy_(own[name])
            own[name] = own[name].new_empty(0)
        self._parameter.data = self.values.new_empty(0)

    def entries(self) -> dict[str, Any]:
        """Return the parameter's state, and as "group.X" the param group's entries that the optimizer has changed."""
        changed = {
            _GROUP + name: value
            for name, value in self._group.items()
            if name not in _PARAMETERS and not (name in self._given and _same(self._given[name], value))
        }
        return {**self._optimizer.state[self._parameter], **changed}

    def state(self) -> RunState:
        if not self._has_state:
            return RunState({}, {})
        values = {**self._optimizer.state[self._parameter]}
        values |= {_GROUP + name: value for name, value in self._group.items()}
        return RunState(
            {name: values[name] for name in self._entries.tensors},
            {name: float(values[name]) for name in self._entries.numbers},
        )

    def restore(self, state: RunState) -> None:
        self._start()
        if not state.tensors and not state.numbers:
            return
        self._check_names(state)
        restored = self._optimizer.state[self._parameter]
        for name, example in self._entries.values.items():
            if name in self._entries.tensors:
                restored[name] = torch.empty_like(self.values, dtype=example.dtype).copy_(state.tensors[name])
            elif name.startswith(_GROUP):
                self._group[name.removeprefix(_GROUP)] = _like(example, state.numbers[name])
            else:
                restored[name] = None if example is None else _like(example, state.numbers[name])
        self._has_state = True

    def _start(self) -> None:
        self._optimizer = self._recipe.build(self._parameter)
        self._given = {name: value for name, value in self._group.items() if name not in _PARAMETERS}
        self._has_state = False

    @property
    def _group(self) -> dict[str, Any]:
        return self._optimizer.param_groups[0]

    @cached_property
    def _entries(self) -> _StateEntries:
        return _trial_entries(self._recipe, self._parameter)

    def _check_names(self, state: RunState) -> None:
        wanted = {*self._entries.tensors, *self._entries.numbers}
        found = {*state.tensors, *state.numbers}
        if found != wanted:
            given = f"a saved optimizer state of {', '.join(sorted(found))}"
            rule = f"{self._recipe.kind.__name__} keeps {', '.join(sorted(wanted)) or 'nothing'}"
            raise CheckpointError(Problem(given, rule, "a checkpoint of the same optimizer with the same options"))


def _trial_entries(recipe: _Recipe, like: Tensor) -> _StateEntries:
    """Return an optimizer's state entries after its first step, from a trial of three elements like `like`'s."""
    piece = _Piece(recipe.at_trial_rate(), torch.zeros(3, dtype=like.dtype, device=like.device))
    piece.step(torch.zeros_like(piece.values))
    entries = piece.entries()
    tensors = tuple(name for name, value in entries.items() if isinstance(value, Tensor) and value.shape == (3,))
    numbers = tuple(name for name, value in entries.items() if value is not None and name not in tensors)
    return _StateEntries(tensors, numbers, entries)


def _like(example: Any, number: float) -> Any:
    """Return the number in the example's type, for a tensor with its dtype and device."""
    return torch.full_like(example, number) if isinstance(example, Tensor) else type(example)(number)


def _has_stepped(template: Optimizer, group: int, recipe: _Recipe) -> bool:
    """Return True if a parameter of the group has another state than in a new optimizer (some have one at once)."""
    parameter = nn.Parameter(torch.zeros(3))
    fresh = recipe.build(parameter).state.get(parameter, {})
    numbers = {name: float(value) for name, value in fresh.items() if _is_number(value)}
    states = [template.state.get(p, {}) for p in template.param_groups[group]["params"]]
    return any(
        state.keys() != fresh.keys() or any(float(state[name]) != number for name, number in numbers.items())
        for state in states
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _reason_against(recipe: _Recipe) -> str | None:
    """Return the reason that this optimizer is not elementwise, or cannot be saved; None if the trial succeeds."""
    closure = inspect.signature(recipe.kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return "its step asks for a closure that evaluates the model again"
    # The trials compute also where other tensors have no values.
    with torch.random.fork_rng(devices=[]), _disable_current_modes():
        for trial, place in (
            (_reason_against_state, "a matrix with a dense gradient"),
            (_reason_against_pieces, "a flat piece"),
            (_reason_against_restoring, "a flat piece whose state was restored"),
            (_reason_against_large_state, "a large piece"),
        ):
            try:
                reason = trial(recipe)
            except Exception as error:
                reason = f"raises {type(error).__name__} on {place}: {str(error).partition(chr(10))[0]}"
            if reason is not None:
                return reason
    return None


def _reason_against_state(recipe: _Recipe) -> str | None:
    """Return the reason that a state entry cannot be saved: it is neither one value per element nor one number."""
    start, gradients = _trial_values()
    piece = _Piece(recipe, start)
    for gradient in gradients:
        piece.step(gradient)
        if any(
            isinstance(value, Tensor) and value.data_ptr() == gradient.data_ptr() for value in piece.entries().values()
        ):
            return "it keeps the gradient itself instead of a copy"
    for name, value in piece.entries().items():
        if isinstance(value, Tensor) and value.shape != _TRIAL_SHAPE and value.numel() != 1:
            return f"its state {name!r} has shape {list(value.shape)} for a parameter of shape {list(_TRIAL_SHAPE)}"
        if value is not None and not isinstance(value, Tensor) and not _is_number(value):
            return f"its state {name!r} is a {type(value).__name__}"
    return None


def _reason_against_large_state(recipe: _Recipe) -> str | None:
    """Return the reason that the state of many elements has another form than that of few, such as integers in blocks.

    What is saved and restored is the form that the small trial has shown.
    """
    piece = _Piece(recipe, torch.zeros(_LARGE_NUMEL))
    piece.step(torch.linspace(-1.0, 1.0, _LARGE_NUMEL))
    known = _trial_entries(recipe, piece.values).values
    for name, value in piece.entries().items():
        if name not in known or (isinstance(value, Tensor) and value.numel() != 1 and value.shape != (_LARGE_NUMEL,)):
            return f"its state {name!r} of {_LARGE_NUMEL} elements is not one value for each"
        if isinstance(value, Tensor) and (type(value) is not type(known[name]) or value.dtype != known[name].dtype):
            kinds = f"{type(value).__name__} of {value.dtype}"
            return f"its state {name!r} of {_LARGE_NUMEL} elements is a {kinds}, unlike that of 3"
    return None


def _reason_against_pieces(recipe: _Recipe) -> str | None:
    whole, pieces = _whole_and_pieces(recipe, restored_before=None)
    if torch.allclose(whole, pieces, rtol=_TOLERANCE, atol=_TOLERANCE):
        return None
    return f"elements of a flat piece differ from the same ones of a matrix by up to {_gap(whole, pieces)}"


def _reason_against_restoring(recipe: _Recipe) -> str | None:
    whole, pieces = _whole_and_pieces(recipe, restored_before=_TRIAL_STEPS // 2)
    if torch.allclose(whole, pieces, rtol=_TOLERANCE, atol=_TOLERANCE):
        return None
    return f"what it keeps in its state does not suffice to go on: values differ by up to {_gap(whole, pieces)}"


def _gap(one: Tensor, other: Tensor) -> str:
    return f"{(one - other).abs().max().item():.1e}"


def _whole_and_pieces(recipe: _Recipe, *, restored_before: int | None) -> tuple[Tensor, Tensor]:
    """Return the weights after the trial's steps, updated as one matrix and as two flat pieces; both flat.

    restored_before: the step before which the pieces' state moves to new optimizers.
    """
    start, gradients = _trial_values()
    flat = start.flatten().clone()
    masters = (flat[:_TRIAL_CUT], flat[_TRIAL_CUT:])
    whole = _Piece(recipe, start)
    pieces = [_Piece(recipe, master) for master in masters]
    buffer = torch.empty_like(flat)
    for step, gradient in enumerate(gradients):
        if step == restored_before:
            states = [piece.state() for piece in pieces]
            pieces = [_Piece(recipe, master) for master in masters]
            for piece, state in zip(pieces, states, strict=True):
                piece.restore(state)
        buffer.copy_(gradient.flatten())
        for piece, part in zip(pieces, (buffer[:_TRIAL_CUT], buffer[_TRIAL_CUT:]), strict=True):
            piece.step(part)
        whole.step(gradient)
    return whole.values.flatten(), flat


def _trial_values() -> tuple[Tensor, list[Tensor]]:
    """Make weights and gradients, whose rows have very different magnitudes."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-2, 2, _TRIAL_SHAPE[0], dtype=torch.float64).unsqueeze(1)
    values = torch.randn(1 + _TRIAL_STEPS, *_TRIAL_SHAPE, generator=generator, dtype=torch.float64)
    return values[0].clone(), [sizes * gradient for gradient in values[1:]]
