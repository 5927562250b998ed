"""The checkpoint that a start resumes from, and the run that it goes on with, so that no other run's is replaced.

    --load            --finetune    what starts                           checkpoints that may lie under --save
    none, or empty    no            a new run                             none
    a checkpoint      no            the run of that checkpoint goes on    its own only
    a checkpoint      yes           a new run                             none
    empty             yes           nothing: an error

An empty --load is an error too, unless it is --save itself, so that one command line serves the first start and every
later one, or --begin-without-checkpoint is given.  Nothing here needs torch.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megazero.checkpoint.folders import MANIFEST, candidates, holds_checkpoint, neighbours, resolve
from megazero.checkpoint.runs import ONE_RUN, RunIdentity, is_intact, name_of, newest_by_run, read_run, run_of
from megazero.config.run import CheckpointConfig
from megazero.errors import CheckpointError, Problem, raise_problems


class Start(NamedTuple):
    """The place that a start goes on from: a step folder, None for initial weights; and a run, None for a new one.

    The newest checkpoint may turn out to be damaged, and an older one of the same root be taken.
    """

    source: Path | None
    run: RunIdentity | None


def find_start(config: CheckpointConfig) -> Start:
    """Return what the configuration starts from.

    Raises CheckpointError if --load holds no checkpoint and has to, or if --save holds checkpoints of another run.
    """
    source = _source(config)
    goes_on = source is not None and not config.finetune
    run = _run_going_on(config, source) if source is not None and goes_on else None
    if source is None and config.save is not None and config.load is not None and _is_same(config.load, config.save):
        run = read_run(config.save)  # of a start that ended before its first checkpoint
    start = Start(source, run)
    if config.save is not None:
        raise_problems(CheckpointError, _problems_of_save(config, config.save, start))
    return start


def _source(config: CheckpointConfig) -> Path | None:
    """Return the step folder that --load means; None where there is none and the run may begin."""
    load = config.load
    if load is None:
        return None
    if holds_checkpoint(load):
        return next(iter(_candidates(load)), None) or resolve(load)
    is_save = config.save is not None and _is_same(load, config.save)
    if not config.finetune and (is_save or config.begin_without_checkpoint):
        return None
    state = "this folder holds none" if load.is_dir() else "there is no such folder"
    ways = [f"--load {near}" for near in neighbours(load)]
    ways += [] if config.finetune else ["--begin-without-checkpoint to start a new run from initial weights"]
    rule = f"--load takes up a checkpoint, and {state}"
    raise CheckpointError(Problem(f"--load {load}{' --finetune' * config.finetune}", rule, ", ".join(ways)))


def _candidates(load: Path) -> tuple[Path, ...]:
    """Return the step folders that --load may mean: itself, or those of a root in the order of preference."""
    return (load,) if (load / MANIFEST).exists() else candidates(load).folders


def _is_same(load: Path, save: Path) -> bool:
    return load.resolve() == save.resolve()


def _is_in_place(source: Path, save: Path | None) -> bool:
    return save is not None and source.resolve().parent == save.resolve()


def _run_going_on(config: CheckpointConfig, source: Path) -> RunIdentity | None:
    """Return the run of a checkpoint, or of an older one if its manifest is damaged.

    Where none names a run, it is the one that has taken them over in the same folder.
    """
    assert config.load is not None, "a checkpoint comes from --load"
    save = config.save
    taken_over = read_run(save) if save is not None and _is_in_place(source, save) else None
    intact = next(filter(is_intact, _candidates(config.load)), None)
    return (intact and run_of(intact)) or taken_over


def _problems_of_save(config: CheckpointConfig, save: Path, start: Start) -> Iterator[Problem]:
    """Yield a problem for each run with checkpoints under --save that this start does not go on with."""
    newest = newest_by_run(save, start.run)
    if start.source is not None and not config.finetune:
        if start.run is not None:
            newest.pop(start.run.id, None)
        if _is_in_place(start.source, save):  # older than ids, as the checkpoint that is resumed may be too
            newest.pop("", None)
    for run, folder in newest.values():
        others = f"--save {save} holds checkpoints of {name_of(run)}, the newest {folder.path.name}"
        yield Problem(f"{others}; {_describe(config, start)}", ONE_RUN, _ways_out(config, save))


def _describe(config: CheckpointConfig, start: Start) -> str:
    if start.source is not None and not config.finetune:
        return f"--load {config.load} goes on with {name_of(start.run)} from {start.source.name}"
    if start.source is not None:
        return f"--finetune begins a new run from {start.source}"
    without = "without --load" if config.load is None else f"with nothing in --load {config.load}"
    return f"{without}, this start is a new run"


def _ways_out(config: CheckpointConfig, save: Path) -> str:
    others = "another folder as --save"
    if config.finetune:
        return f"--load {save} without --finetune to go on with it, {others} to begin a new run"
    return f"--load {save} to go on with it, {others} {'to begin a new run' if config.load is None else 'to keep both'}"
