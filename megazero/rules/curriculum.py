"""Rules for a curriculum by sequence length."""

import math
from collections.abc import Iterator

from megazero.config import derived
from megazero.config.curriculum import Curriculum, read_curriculum
from megazero.config.nearest import flags, neighbours
from megazero.config.run import RunConfig
from megazero.errors import Problem
from megazero.rules.float8 import MULTIPLE


def lengths_are_read(config: RunConfig, world_size: int) -> Iterator[Problem]:
    if config.curriculum.curriculum_learning:
        found = read_curriculum(config.curriculum, config.model.seq_length)
        if isinstance(found, Problem):
            yield found


def lengths_fit_the_layout(config: RunConfig, world_size: int) -> Iterator[Problem]:
    found = _read(config)
    unit, reason = _unit(config)
    if found is None or unit == 1:
        return
    if found.seqlens:
        wrong = [length for length in found.seqlens if length % unit]
        if wrong:
            legal = ", ".join(f"{' or '.join(map(str, neighbours(length, unit)))} for {length}" for length in wrong[:5])
            given = f"--curriculum-seqlens {' '.join(config.curriculum.curriculum_seqlens)}"
            yield Problem(given, f"lengths are multiples of {unit}: {reason}", legal)
        return
    sizes = {"--curriculum-seqlen-step": found.multiple, "--curriculum-max-seqlen": found.largest}
    for flag, size in sizes.items():
        if size % unit:
            yield Problem(
                f"{flag} {size}", f"lengths are multiples of {unit}: {reason}", flags(flag, neighbours(size, unit))
            )


def _unit(config: RunConfig) -> tuple[int, str]:
    """Return the number of which the length of rows is a multiple in this layout, and why."""
    micro, tensor = config.training.micro_batch_size, config.parallel.tensor_model_parallel_size
    split = tensor // math.gcd(tensor, micro) if config.parallel.sequence_parallel else 1
    narrow = 1 if config.precision.fp8_format is None else MULTIPLE // math.gcd(MULTIPLE, micro)
    reasons = {
        f"--sequence-parallel splits the tokens of {micro} rows evenly over {tensor} processes": split,
        f"8-bit products are of multiples of {MULTIPLE} tokens, in {micro} rows": narrow,
    }
    return math.lcm(split, narrow), " and ".join(reason for reason, size in reasons.items() if size > 1)


def cut_rows_are_not_compiled(config: RunConfig, world_size: int) -> Iterator[Problem]:
    if config.curriculum.curriculum_learning and config.training.compile in ("on", "max"):
        rule = "compiled code is for rows of one length, and a curriculum has many"
        given = f"--compile {config.training.compile} with --curriculum-learning"
        yield Problem(given, rule, "--compile auto, --compile off, or leave out --curriculum-learning")


def thresholds_are_samples(config: RunConfig, world_size: int) -> Iterator[Problem]:
    if config.curriculum.curriculum_learning and config.training.step_batch_size_schedule:
        words = " ".join(config.training.step_batch_size_schedule)
        given = f"--step-batch-size-schedule {words} with --curriculum-learning"
        rule = "its thresholds are tokens of whole rows, which a curriculum cuts"
        yield Problem(given, rule, "--rampup-batch-size, whose threshold is in samples")


def schedule_counts_one_thing(config: RunConfig, world_size: int) -> Iterator[Problem]:
    optimizer = config.optimizer
    tokens = [f"--lr-{part}-tokens" for part in ("warmup", "decay") if getattr(optimizer, f"lr_{part}_tokens")]
    samples = [f"--lr-{part}-samples" for part in ("warmup", "decay", "wsd-decay") if getattr(optimizer, _field(part))]
    if tokens and samples and derived.row_lengths(config).varies:
        rule = "under a curriculum samples have different numbers of tokens: the lengths are in one of the two"
        yield Problem(" and ".join((*tokens, *samples)), rule, "all of them in tokens, or all in samples")


def _field(part: str) -> str:
    return f"lr_{part.replace('-', '_')}_samples"


def _read(config: RunConfig) -> Curriculum | None:
    """Return the schedule of a run that has one without a problem."""
    if not config.curriculum.curriculum_learning:
        return None
    found = read_curriculum(config.curriculum, config.model.seq_length)
    return found if isinstance(found, Curriculum) else None


CURRICULUM_RULES = (
    lengths_are_read,
    lengths_fit_the_layout,
    cut_rows_are_not_compiled,
    thresholds_are_samples,
    schedule_counts_one_thing,
)
