"""Compares megazero with other systems on the same work: one model, the same first values, samples and optimizer.

    python benchmarks/compare.py [--world-size 2] [--rounds 6] [--steps 8] [--systems ddp megazero-0] [--output FILE.md]
    python benchmarks/compare.py --preset llama3-8b --num-layers 4 --hidden-size 512 --num-attention-heads 8
        --num-query-groups 2 --ffn-hidden-size 1536 --seq-length 256 --vocab-size 4096

The model is a GPT-2 of the given size, or a preset's, whose sizes flags change: a GPT-2, or a Llama.

The systems of several processes are `floor` (the plain model without any communication: the least time that peers can
take, but not megazero, which has kernels of its own), torch's `ddp`, `ddp-view` (gradients as views of its buckets),
`zero1-torch` (ZeroRedundancyOptimizer), `fsdp2` and `fsdp2-keep` (which keeps parameters gathered until backward),
`deepspeed-0` to `-3` where DeepSpeed is installed, `megatron-core` and `megatron-core-1` (its distributed optimizer)
where Megatron-core is, and by ZeRO stage `library-0` to `-3`, `megazero.initialize` around the plain model
(`library-3-keep` keeps parameters until backward too), and `megazero-0` to `-3`, the step of pretrain_gpt.py.  Those of
one process are `eager`, `compiled` (torch.compile), `library` and `megazero`.

Every system has processes of its own, so that its memory is its own.  They take turns in one run (A B C A B C ...)
while others sleep, so that whatever else the machine does hits all alike; the first turn of each is a warm-up.  Then
the plain model trains as many steps in one process with all samples; a system whose losses differ from its by more than
a bound is named, has no part in ratios, and makes the exit status 1.  DeepSpeed has its defaults: in stage 3 it keeps
parameters that are used again within 1e9 parameters, so a small model stays gathered from forward to backward.

A vocabulary is rounded up to a multiple of 128 for all.  On a GPU the models of all systems are in memory at once: if
they don't fit, name fewer systems.  A system that fails is reported as failed, and the others go on.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from jobs import Job
from plain_gpt import absent_from_plain, beside_gpt2, hollow_gpt
from report import HelpFormat, add_output, publish, tell
from standings import BOUNDS, NOT_INSTALLED, Comparison, Run, body_of, record
from steps import configuration
from systems import ALONE, MEGATRON, PLAIN, TOGETHER, Work, missing
from turns import Contestant

from megazero.config.model import ModelConfig
from megazero.config.presets import PRESETS
from megazero.errors import ConfigError, UserError

# The model's shape, unless a preset or a flag gives another.
SHAPE: Mapping[str, int] = {
    "num_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "seq_length": 128,
    "vocab_size": 4096,
}
# Sizes that presets of Llama have beside.
_MORE_SIZES = ("ffn_hidden_size", "num_query_groups")
_VOCABULARY_MULTIPLE = 128


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    parser.add_argument("--world-size", type=int, default=2, help="processes of a system")
    parser.add_argument("--rounds", type=int, default=6, help="turns of every system; the first is a warm-up")
    parser.add_argument("--steps", type=int, default=8, help="steps of a turn")
    parser.add_argument("--systems", nargs="+", metavar="NAME", help="which; without it, all that there are")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="end after the round that goes beyond it")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="the model, but for what flags say")
    for name, value in SHAPE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"of the model; without a preset {value}")
    for name in _MORE_SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="of the model; without it, the preset's")
    parser.add_argument("--micro-batch-size", type=int, default=2, help="samples of a process and step")
    parser.add_argument("--precision", choices=sorted(BOUNDS), default="fp32", help="number format")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where processes compute")
    add_output(parser)
    options = parser.parse_args(words)
    if options.rounds < 2:
        parser.error("--rounds: at least 2, since the first is a warm-up")
    try:
        work = work_of(options)
        configuration(work.flags(), options.world_size)
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    if absent := absent_from_plain(work.model):
        parser.error(
            f"--preset {options.preset}: the plain model has no {', '.join(absent)}; a GPT-2 or a Llama is legal"
        )
    known = systems_of(work)
    options.systems = options.systems or list(known)
    for name in options.systems:
        if name not in known:
            parser.error(f"--systems {name}: for this model and so many processes there are {', '.join(known)}")
    return options


def systems_of(work: Work) -> tuple[str, ...]:
    """Return the names of the systems that can do the work; Megatron-core's model here is a GPT-2."""
    if work.world_size == 1:
        return ALONE
    return tuple(name for name in TOGETHER if name not in MEGATRON or not beside_gpt2(work.model))


def work_of(options: argparse.Namespace) -> Work:
    shape = dict(SHAPE if options.preset is None else PRESETS[options.preset])
    shape |= {name: given for name in (*SHAPE, *_MORE_SIZES) if (given := getattr(options, name)) is not None}
    shape["vocab_size"] += -shape["vocab_size"] % _VOCABULARY_MULTIPLE
    shape.pop("max_position_embeddings", None)
    model = ModelConfig(**{**shape, "hidden_dropout": 0.0, "attention_dropout": 0.0})
    return Work(model, options.micro_batch_size, options.precision, options.world_size)


def threads(world_size: int) -> int:
    """Return the number of threads for each process, so that each core has one thread."""
    return max(1, len(os.sched_getaffinity(0)) // world_size)


@contextmanager
def failures_of(name: str, runs: Mapping[str, Run]) -> Iterator[None]:
    """Catch the failure of a system within this context and keep its reason, so that the system gets no more turns."""
    try:
        yield
    except (RuntimeError, UserError) as error:
        runs[name].refused = f"failed: {str(error).strip().splitlines()[-1]}"
        tell(f"{name} failed:\n{error}")


def compete(work: Work, options: argparse.Namespace) -> dict[str, Run]:
    """Run all systems in turns until the rounds or the time are over, and return each one's run by name."""
    runs = {name: Run(refused=NOT_INSTALLED if missing(name) else "") for name in options.systems}
    jobs: dict[str, Job] = {}
    began = time.monotonic()
    try:
        for name in _left(runs):
            with failures_of(name, runs):
                jobs[name] = Job(
                    work.world_size,
                    Contestant,
                    name,
                    work,
                    device=options.device,
                    num_threads=threads(work.world_size),
                )
                runs[name].settings, runs[name].version = jobs[name].ask("described")[0]
        for number in range(options.rounds):
            for name in _left(runs):
                with failures_of(name, runs):
                    runs[name].turns.append(jobs[name].ask("turn", options.steps))
            tell(f"round {number + 1} of {options.rounds}")
            if number and options.time_limit is not None and time.monotonic() - began > options.time_limit:
                break
        for name in _left(runs):
            with failures_of(name, runs):
                runs[name].held = jobs[name].ask("held")
    finally:
        for job in jobs.values():
            job.end()
    return runs


def _left(runs: Mapping[str, Run]) -> list[str]:
    """Return the names of the systems that are installed and have not failed."""
    return [name for name, run in runs.items() if not run.refused]


def plain_losses(work: Work, steps: int, device: str) -> list[float]:
    """Return the losses of the plain model in one process, which takes every process's samples."""
    job = Job(1, Contestant, PLAIN, work, device=device, num_threads=threads(1))
    [turn] = job.ask("turn", steps)
    job.end()
    losses: list[float] = turn.losses
    return losses


def compare(options: argparse.Namespace) -> Comparison:
    """Run the whole comparison and return everything that was measured."""
    work = work_of(options)
    runs = compete(work, options)
    steps = max((len(run.losses) for run in runs.values()), default=0)
    plain = plain_losses(work, steps, options.device) if steps else []
    shape = work.model
    size = f"{shape.num_layers} x {shape.hidden_size}"
    is_changed = any(getattr(options, name) is not None for name in (*SHAPE, *_MORE_SIZES))
    name = size if options.preset is None else f"{options.preset} at {size}" if is_changed else options.preset
    return Comparison(work, name, threads(work.world_size), options.device, options.steps, plain, runs)


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    comparison = compare(options)
    num_parameters = sum(parameter.numel() for parameter in hollow_gpt(comparison.work.model).parameters())
    made = record(comparison, num_parameters)
    title = f"# megazero beside others on the same work\n\n{made['date']}: `{made['command']}`"
    publish([title, body_of(made)], options.output, made)
    return 0 if comparison.is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
