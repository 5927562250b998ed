"""A configuration whose layout is verified: the same in float64, and the same run on one process.

In float64, without dropout, wires that round, and late updates, a layout differs from one process by the order of
additions only, so a larger difference is an error.  The number of steps to compare is no setting of a run: it is
removed from the words before they are read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from megazero.config import derived
from megazero.config.engine_sections import ActivationConfig, OptimizerConfig, PrecisionConfig, ZeroConfig
from megazero.config.fields import FieldInfo
from megazero.config.optimizers import RUN_NAMES, in_numbers
from megazero.config.run import FIELDS, CheckpointConfig, ParallelConfig, RunConfig
from megazero.errors import Problem

STEPS_FLAG = "--verify-steps"
DEFAULT_STEPS = 3
# The settings of what one process cannot equal, by the beginnings of their names: rounded messages, and late updates.
_NOT_EXACT = ("zero_quantized_", "zero_error_feedback", "delayed_parameter_update")


class VerifyArguments(NamedTuple):
    """The command line of a verification: its number of steps, and the words that are the run's."""

    steps: int
    rest: list[str]
    problems: tuple[Problem, ...]


def split_verify_steps(argv: Sequence[str]) -> VerifyArguments:
    """Separate `--verify-steps N` from the words; the last one counts."""
    rest: list[str] = []
    steps, problems = DEFAULT_STEPS, []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name.replace("_", "-") != STEPS_FLAG:
            rest.append(word)
            continue
        if not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
        if value.isdecimal() and int(value) > 0:
            steps = int(value)
        else:
            rule = "the number of steps that are compared is a whole number, at least 1"
            problems.append(Problem(f"{STEPS_FLAG} {value}".rstrip(), rule, f"{STEPS_FLAG} {DEFAULT_STEPS}"))
    return VerifyArguments(steps, rest, tuple(problems))


def without_checkpoints(config: RunConfig) -> RunConfig:
    """Return the same configuration without checkpoints and evaluation, which a verification does not need."""
    return replace(config, checkpoint=CheckpointConfig(), training=replace(config.training, eval_iters=0))


def exact(config: ZeroConfig) -> ZeroConfig:
    """Return the same layout with full numbers on all wires, each step's update before the next, in no other dtype."""
    left_out = {field.name for field in fields(config) if field.name.startswith(_NOT_EXACT)}
    defaults = ZeroConfig(zero_stage=config.zero_stage)
    changed = {name: getattr(defaults, name) for name in left_out}
    return replace(config, communication_data_type="auto", **changed)


def in_float64(config: RunConfig) -> RunConfig:
    """Return the same layout in float64, exact, without dropout, checkpoints and evaluation, moments in numbers."""
    return replace(
        without_checkpoints(config),
        model=replace(config.model, hidden_dropout=0.0, attention_dropout=0.0),
        precision=PrecisionConfig(precision="fp64"),
        zero=exact(config.zero),
        optimizer=_in_numbers(config.optimizer),
    )


def _in_numbers(config: OptimizerConfig) -> OptimizerConfig:
    """Return the same optimizer with moments that are numbers."""
    kind = in_numbers(RUN_NAMES[config.optimizer])
    name: Any = next(name for name, entry in RUN_NAMES.items() if entry == kind)
    return replace(config, optimizer=name)


def on_one_process(config: RunConfig, world_size: int) -> RunConfig:
    """Return the plain run that a layout on `world_size` processes has to equal: the same steps, unpartitioned."""
    parallel = config.parallel
    return replace(
        config,
        parallel=ParallelConfig(device=parallel.device, distributed_backend=parallel.distributed_backend),
        zero=ZeroConfig(zero_stage=0),
        activations=ActivationConfig(),
        training=replace(config.training, global_batch_size=derived.global_batch_size(config, world_size)),
    )


def overridden(config: RunConfig) -> str:
    """Return the settings that float64 overrides, as flags parted by blanks; "" if there are none."""
    return " ".join(_flags(config, in_float64(config)))


def _flags(before: RunConfig, after: RunConfig) -> Iterator[str]:
    for info in FIELDS:
        mine, other = (getattr(getattr(config, info.section), info.name) for config in (before, after))
        if mine != other and info.name != "eval_iters":
            yield _spelt(info, mine)


def _spelt(info: FieldInfo, value: object) -> str:
    return info.flag if value is True else f"{info.flag} {value}"


def in_stage(config: ZeroConfig, stage: int | None) -> ZeroConfig:
    """Return the configuration in another ZeRO stage; None: its own."""
    return config if stage is None else replace(config, zero_stage=stage)


def describe_stage(config: ZeroConfig) -> str:
    """Describe the stage: `ZeRO stage 2`."""
    return f"ZeRO stage {config.zero_stage}"


def describe_layout(config: RunConfig) -> str:
    """Describe the layout beyond its degrees: `ZeRO stage 2, sequence parallel, 1f1b schedule, full recomputation`."""
    words = [describe_stage(config.zero)]
    if config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size > 1:
        words.append("sequence parallel")
    if config.parallel.pipeline_model_parallel_size > 1:
        words.append(f"{derived.pipeline_schedule(config)} schedule")
    if config.activations.recompute_granularity != "none":
        words.append(f"{config.activations.recompute_granularity} recomputation")
    return ", ".join(words)
