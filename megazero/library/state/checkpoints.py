"""Saves the training of an engine and resumes it, in the checkpoints of a run, which any layout reads.

A checkpoint holds master weights, the optimizer's state and persistent buffers as boxes of named tensors.  Its progress
has the counters of a run, and

    param_groups     options of the optimizer's param groups, without their parameters
    schedule         the configuration's schedule and its position, null without one
    skipped_steps    steps that changed nothing
    tag              the name that the user gives the checkpoint, if any
    client_state     the user's own state, as JSON in a text: its numbers may be infinite, which a manifest's may not

torch's random state is not part of it, as in a run.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megazero.checkpoint.agreement import all_or_none
from megazero.checkpoint.background import BackgroundSave, host_copies
from megazero.checkpoint.engine_state import (
    OPTIMIZER,
    check_optimizer,
    numbers_entry,
    numbers_of_all,
    restore_engine,
    saved_fragments,
)
from megazero.checkpoint.fallback import Taken, report, restore_first_sound
from megazero.checkpoint.folder_lock import lock_folder
from megazero.checkpoint.folders import MANIFEST, list_steps, resolve
from megazero.checkpoint.reader import Checkpoint
from megazero.checkpoint.retention import Retention
from megazero.checkpoint.runs import (
    ONE_RUN,
    PROGRESS_KEY,
    TAG_KEY,
    RunIdentity,
    name_of,
    new_run,
    newest_by_run,
    read_run,
    tag_of,
    write_run,
)
from megazero.checkpoint.state import TrainState
from megazero.checkpoint.writer import Draft, save
from megazero.comm.interface import Communicator
from megazero.comm.mesh import Mesh
from megazero.comm.startup import second_control
from megazero.config import derived
from megazero.errors import CheckpointError, DamageError, Problem, UsageError, raise_problems
from megazero.files import parse_json
from megazero.library.config import EngineConfig
from megazero.library.optimizers import EngineOptimizer
from megazero.library.state.optimizer import OptimizerState
from megazero.library.state.save import contents
from megazero.library.step.stepping import Stepper
from megazero.parallel.param_spec import ParamSpec, StateFragment
from megazero.zero.engine import Engine

_BUFFER = "buffer"
_GROUPS, _SCHEDULE, _SKIPPED, _CLIENT = "param_groups", "schedule", "skipped_steps", "client_state"
_DYNAMIC = "loss_scale_is_dynamic"
_PARAMETERS = ("params", "param_names")
_MAX_CLIENT_BYTES = 64 << 20
_INFINITE = (float("inf"), float("-inf"))


class Loading(NamedTuple):
    """The parts of a checkpoint that are loaded beside weights and buffers.

    optimizer: moments, step count and options; without it, the optimizer begins anew.  schedule: its position, and
    learning rates.  counters: steps and loss scale.
    """

    optimizer: bool = True
    schedule: bool = True
    counters: bool = True


class Loaded(NamedTuple):
    """The values that a checkpoint has brought beside state that is in the engine already.

    state: None if the counters were not loaded.  changed: a line for each option that differs from the engine's, and
    for each part of the state that begins anew.
    """

    taken: Taken
    state: TrainState | None
    skipped_steps: int
    client_state: dict[str, Any]
    changed: tuple[str, ...]

    def warnings(self) -> Iterator[str]:
        """Yield a line for each checkpoint passed over, each option that was replaced, and each part begun anew."""
        if not self.taken.is_newest:
            yield from report(self.taken)
        yield from self.changed


class CheckpointRequest(NamedTuple):
    """A checkpoint to be written.  client_state: JSON values by name; rank 0's is saved."""

    root: Path
    tag: str | None
    counters: TrainState
    skipped_steps: int
    client_state: Mapping[str, Any] | None
    retention: Retention


@dataclass
class Checkpoints:
    """A writer and a reader of one engine's checkpoints; all calls are collective.

    run: the training that checkpoints belong to, None before the first save or load.  background: what saves beside
    training, from the first such save on.
    """

    module: nn.Module
    engine: Engine
    mesh: Mesh
    config: EngineConfig
    optimizer: EngineOptimizer
    optimizer_state: OptimizerState
    stepper: Stepper
    run: RunIdentity | None = None
    background: BackgroundSave | None = None

    @property
    def is_saving(self) -> bool:
        """True from a save beside training until it is finished, the same on all ranks."""
        return self.background is not None and self.background.is_under_way

    @property
    def has_failed(self) -> bool:
        """True if `finish` will raise; ranks differ for a moment."""
        return self.background is not None and self.background.has_failed

    def save(self, request: CheckpointRequest) -> Path:
        """Write a checkpoint and return its folder; it appears whole or not at all.

        Raises CheckpointError on all ranks.
        """
        self.finish()
        with ExitStack() as held:
            draft, fragments = self._draft(request, held)
            return save(draft, fragments, control=self.mesh.control)

    def begin(self, request: CheckpointRequest) -> Future[Path]:
        """Write a checkpoint of the present state beside training; return what becomes of it."""
        self.finish()
        if self.background is None:
            minutes = derived.collective_limit_minutes(self.config.limits)
            self.background = BackgroundSave(second_control(self.mesh, minutes), self.mesh.meter)
        with ExitStack() as held:
            draft, fragments = self._draft(request, held)
            copies = host_copies(fragments, self.engine.settings.ledger)
            return self.background.begin(draft, copies, held.pop_all())

    def finish(self) -> None:
        """Wait for the save beside training, if there is one; raise its error, which all ranks have."""
        if self.background is not None:
            self.background.finish()

    def _draft(self, request: CheckpointRequest, held: ExitStack) -> tuple[Draft, list[StateFragment]]:
        """Lock the folder until `held` is closed; return the checkpoint and the state that this rank saves."""
        control, run = self.mesh.control, self.run or new_run()
        text = all_or_none(control, lambda: _client_text(request.client_state), doing="reading client_state")[0]
        progress = {
            PROGRESS_KEY: run.to_json(),
            **({} if request.tag is None else {TAG_KEY: request.tag}),
            **request.counters.to_json(),
            _DYNAMIC: self.stepper.scale_is_dynamic,
            _SKIPPED: request.skipped_steps,
            OPTIMIZER: self.optimizer.kind,
            **numbers_entry(numbers_of_all(self.engine, control=control)),
            _GROUPS: [_options(group) for group in self.optimizer.groups],
            _SCHEDULE: None if self.config.scheduler is None else self.stepper.rates.state_dict(),
            _CLIENT: text,
        }
        config = json.dumps(asdict(self.config), indent=1, default=str) + "\n"  # JSON is YAML
        self.engine.publish_late()  # a training that goes on from here begins with what is saved
        self.engine.ensure_parameters()
        buffers = [_fragment(name, buffer) for name, buffer in _buffers(self.module)]
        if self.mesh.axis("tp").size > 1:
            self._check_alike(buffers)
        lock = lock_folder(request.root, control=control)
        if lock is not None:
            held.callback(lock.release)
        leads = control.rank == 0
        all_or_none(control, lambda: _begin(request.root, run) if leads else None, doing=f"writing to {request.root}")
        self.run = run
        draft = Draft(request.root, request.counters.iteration, progress, config, lock, request.retention)
        return draft, [*saved_fragments(self.engine), *(buffers if leads else ())]

    def _check_alike(self, buffers: Iterable[StateFragment]) -> None:
        """Raise CheckpointError if tensor-parallel ranks have buffers of different values."""

        def digest() -> str | None:
            if self.mesh.axis("dp").rank > 0:
                return None
            content = (bytes(each.tensor.cpu().contiguous().view(torch.uint8).numpy().data) for each in buffers)
            return hashlib.sha256(b"".join(content)).hexdigest()

        digests = all_or_none(self.mesh.control, digest, doing="comparing buffers")
        if len({each for each in digests if each is not None}) > 1:
            rule = "a checkpoint has one value of each persistent buffer"
            raise CheckpointError(
                Problem("buffers that differ between tensor-parallel ranks", rule, "persistent=False")
            )

    def load(self, root: Path, tag: str | None, parts: Loading) -> Loaded | None:
        """Restore the newest sound checkpoint under `root`, or the one with this tag; None if there is none at all.

        An engine without an optimizer takes weights and buffers only: it does not go on with a training.
        Raises CheckpointError on all ranks: for a checkpoint that does not fit, before anything is changed.
        """
        self.finish()
        if not self.optimizer.exists:
            parts = Loading(optimizer=False, schedule=False, counters=False)
        control = self.mesh.control
        path = Path(all_or_none(control, lambda: str(choose_folder(root, tag)), doing=f"reading {root}")[0])
        values = [(buffer, _fragment(name, torch.empty_like(buffer))) for name, buffer in _buffers(self.module)]

        anew: list[str] = []

        def take(found: Checkpoint) -> None:
            self._check_fits(found, parts)
            others = (fragment for _, fragment in values)
            anew[:] = restore_engine(found, self.engine, control, with_optimizer=parts.optimizer, others=others)

        try:
            taken = restore_first_sound(path, _check_counters, take, lambda _: None, control=control)
        except DamageError as error:
            rule = "it may have taken over parts of what is damaged"
            legal = "a sound checkpoint before training goes on"
            raise CheckpointError(*error.problems, Problem("the engine's state", rule, legal)) from error
        if taken is None:
            return None
        if not parts.optimizer:
            self.optimizer_state.reset()
        with torch.no_grad():
            for buffer, fragment in values:
                filled = fragment.tensor.view(fragment.spec.full_shape)
                buffer.copy_(torch.view_as_complex(filled) if buffer.is_complex() else filled)
        loaded = self._resume(taken, parts)
        return loaded._replace(changed=(*loaded.changed, *anew))

    def _check_fits(self, found: Checkpoint, parts: Loading) -> None:
        """Raise CheckpointError if the optimizer, its param groups or the schedule are not those of the checkpoint."""
        if parts.optimizer:
            otherwise = "load_optimizer_states=False"
            check_optimizer(found, self.optimizer.kind, given=f"optimizer {self.optimizer.kind}", otherwise=otherwise)
            groups: Any = found.progress.get(_GROUPS)
            if isinstance(groups, list) and len(groups) != len(self.optimizer.groups):
                given = f"an optimizer with {len(self.optimizer.groups)} param groups; {found.folder} has {len(groups)}"
                raise CheckpointError(
                    Problem(given, "a resumed optimizer has the param groups it began with", otherwise)
                )
        if parts.schedule and _SCHEDULE in found.progress:
            saved: Any = found.progress[_SCHEDULE]
            legal = "or load_lr_scheduler_states=False, which begins the configuration's schedule anew"
            differ = self.stepper.rates.differences(saved)
            raise_problems(
                CheckpointError,
                (Problem(f"{each.given} in {found.folder}", each.rule, f"{each.legal}, {legal}") for each in differ),
            )

    def _resume(self, taken: Taken, parts: Loading) -> Loaded:
        """Restore what is in the checkpoint's progress."""
        found = taken.checkpoint
        progress: Mapping[str, Any] = found.progress
        client_state = parse_json(progress.get(_CLIENT) or "{}")
        changed: list[str] = []
        if parts.optimizer:
            for index, (group, saved) in enumerate(
                zip(self.optimizer.groups, progress.get(_GROUPS) or (), strict=False)
            ):
                moved = self.stepper.rates.moved
                changed += _restore_options(group, saved, moved, index=index, with_rates=parts.schedule)
        if not parts.counters:
            return Loaded(taken, None, 0, client_state, tuple(changed))
        state = TrainState.from_json(progress, step=found.step)
        if not (self.stepper.scale_is_dynamic and progress.get(_DYNAMIC)):
            state.loss_scale = self.stepper.scale_state  # a constant scale is no state of a dynamic one
        schedule: Any = progress.get(_SCHEDULE)
        if parts.schedule and schedule is not None:
            self.stepper.rates.load_state_dict(schedule)
        self.stepper.resume(state.loss_scale, num_steps=state.iteration)
        self.run = RunIdentity.from_json(progress.get(PROGRESS_KEY))
        return Loaded(taken, state, int(progress.get(_SKIPPED, 0)), client_state, tuple(changed))


def _begin(root: Path, run: RunIdentity) -> None:
    """Write whose checkpoints the folder holds; raise CheckpointError if it has some of another training."""
    newest = newest_by_run(root, run)
    newest.pop(run.id, None)
    problems = (
        Problem(
            f"save_checkpoint to {root}, which holds checkpoints of {name_of(other)}, the newest {folder.path.name}",
            ONE_RUN,
            "load_checkpoint of this folder before, to go on with it; or another folder",
        )
        for other, folder in newest.values()
    )
    raise_problems(CheckpointError, problems)
    if read_run(root) != run:
        write_run(root, run)


def choose_folder(root: Path, tag: str | None) -> Path:
    """Return the root, or the step folder with this tag or of this name; raise CheckpointError if there is none."""
    if tag is None:
        return root
    steps = list_steps(root)
    tags = {tag_of(folder.path): folder.path for folder in steps}
    if tag in tags:
        return tags[tag]
    if (root / tag / MANIFEST).is_file():
        return root / tag
    known = [each for each in tags if each is not None] or [folder.path.name for folder in steps[-10:]]
    rule = "there is no checkpoint with this tag, nor a step folder of this name"
    raise CheckpointError(Problem(f"{root}, tag {tag!r}", rule, ", ".join(known)))


def raise_missing(root: Path, control: Communicator) -> None:
    """Raise CheckpointError that there is no checkpoint under `root`, on all ranks."""
    all_or_none(control, lambda: str(resolve(root)), doing=f"reading {root}")


def _check_counters(found: Checkpoint) -> None:
    TrainState.from_json(found.progress, step=found.step)


# --- buffers ----------------------------------------------------------------------------------------------------------


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the persistent buffers, each under its first name."""
    return [(item.name, item.tensor) for item in contents(module, ())[0] if not isinstance(item.tensor, nn.Parameter)]


def _fragment(name: str, buffer: Tensor) -> StateFragment:
    """Return all of a buffer; complex numbers are pairs of real ones."""
    real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    shape = tuple(real.shape)
    spec = ParamSpec(name, shape, shape, (0,) * len(shape), trainable=False)
    return StateFragment(spec, _BUFFER, 0, spec.numel, real.detach().reshape(-1))


# --- options and the user's own state ---------------------------------------------------------------------------------


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a param group that JSON can hold: numbers, also those in tensors or tuples, and words."""
    options = {name: value for name, value in group.items() if name not in _PARAMETERS}
    for name, value in options.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            options[name] = value.item()
        elif isinstance(value, tuple):
            options[name] = list(value)
    return {
        name: value for name, value in options.items() if value not in _INFINITE and not [*_problems_of(name, value)]
    }


def _restore_options(
    group: dict[str, Any], saved: Mapping[str, Any], moved: tuple[str, ...], *, index: int, with_rates: bool
) -> Iterator[str]:
    """Set the options of a param group to saved ones; yield a line for each that was another one.

    moved: the options that the configuration's schedule writes.  A learning rate or momentum that a schedule moves is
    another one at every step, and gets no line.
    """
    rates = ("lr", "initial_lr", *moved)
    moves = bool(moved) or "initial_lr" in group or "initial_lr" in saved
    for name, value in saved.items():
        if name in rates and not with_rates:
            continue
        before = group.get(name)
        if isinstance(before, Tensor):
            group[name] = torch.full_like(before, value)
        else:
            group[name] = value = tuple(value) if isinstance(before, tuple) else value
        if before is not None and bool(before != value) and not (name in rates and moves):
            yield f"param group {index}: {name} {value} of the checkpoint replaces {before}"


def _client_text(client_state: Mapping[str, Any] | None) -> str | None:
    """Return the user's state as JSON; raise UsageError with the place of every value that JSON cannot hold."""
    if client_state is None:
        return None
    raise_problems(UsageError, _problems_of("client_state", client_state))
    text = json.dumps(client_state)
    if len(text) > _MAX_CLIENT_BYTES:
        given = f"client_state of {len(text)} bytes as JSON"
        raise UsageError(Problem(given, "it is a part of the manifest, which every rank reads", f"{_MAX_CLIENT_BYTES}"))
    parse_json(text)
    return text


def _problems_of(place: str, value: object) -> Iterator[Problem]:
    """Yield a problem for each value inside `value` that JSON would not hold, or would change."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if type(name) is str:
                yield from _problems_of(f"{place}[{name!r}]", inner)
            else:
                given = f"{place} with the key {name!r} of type {type(name).__name__}"
                yield Problem(given, "JSON has names as keys", repr(str(name)))
    elif type(value) is list:
        for index, inner in enumerate(value):
            yield from _problems_of(f"{place}[{index}]", inner)
    elif type(value) not in (bool, int, float, str, type(None)):
        rule = "client_state is saved as JSON, never pickled, and read back as it was"
        yield Problem(f"{place} of type {type(value).__name__}", rule, "dict, list, str, int, float, bool, None")
