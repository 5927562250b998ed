"""The layouts that an advisor tries: values of the settings that place and order a run, and never of those that train.

A choice is legal if a start would take its command line: the rules decide, and nothing of them is repeated here.
Choices that differ from another one only by being slower and larger are left out: gpipe takes the time of 1f1b and more
memory, and tensor parallelism without a split sequence the messages of one with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import log2
from types import MappingProxyType
from typing import Any, NamedTuple

from megazero.command_line.flags import split_words
from megazero.command_line.names import spellings
from megazero.command_line.parse import resolve
from megazero.config import derived
from megazero.config.named import undecided, value_in, with_values
from megazero.config.run import FIELDS, RunConfig
from megazero.config.validate import INFO
from megazero.errors import ConfigError, Problem, UserError, raise_problems
from megazero.parallel.nodes import Nodes
from megazero.planner.words import Wanted, made_up, read_run
from megazero.rules import run as rules

_MOST_SAMPLES = 64  # of a micro-batch
_CHUNKS = (2, 3, 4, 8)
_GROUPS = (1, 2, 4, 8)  # nodes of a shard group
# Sections whose settings the advisor chooses, and further settings of others.
_SECTIONS = ("zero", "activations")
_FURTHER = ("pipeline_split", "global_batch_size")


class LayoutChoice(NamedTuple):
    """A layout: values of settings by their names."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    num_layers_per_virtual_pipeline_stage: int | None = None
    pipeline_schedule: str = "auto"
    sequence_parallel: bool = False
    zero_stage: int = 1
    mics_shard_size: int = -1
    zero_hpz_partition_size: int = 1
    zero_quantized_weights: bool = False
    zero_quantized_gradients: bool = False
    offload_optimizer: str = "none"
    offload_param: str = "none"
    recompute_granularity: str = "none"
    micro_batch_size: int = 1

    @property
    def rounds(self) -> bool:
        """True if numbers are rounded on their way, so that the training is another one."""
        return self.zero_quantized_weights or self.zero_quantized_gradients

    def changes(self, other: "LayoutChoice") -> int:
        """Return the number of settings in which two choices differ; a split sequence follows tensor parallelism."""
        mine, others = self._asdict(), other._asdict()
        return sum(mine[name] != others[name] for name in mine if name != "sequence_parallel")

    @property
    def traits(self) -> tuple[float, ...]:
        """The figures of a layout on which it depends how far formulas of its time and memory are off."""
        sizes = (self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.micro_batch_size)
        held = (
            self.pipeline_model_parallel_size > 1,
            self.num_layers_per_virtual_pipeline_stage is not None,
            self.pipeline_schedule == "zero-bubble",
            *(self.zero_stage == stage for stage in (0, 1, 2, 3)),
            self.mics_shard_size > 0,
            self.zero_hpz_partition_size > 1,
            self.zero_quantized_weights,
            self.zero_quantized_gradients,
            self.offload_optimizer != "none",
            self.offload_param != "none",
            *(self.recompute_granularity == name for name in ("selective", "full")),
        )
        return (*(log2(size) / 2 for size in sizes), *map(float, held))

    def describe(self) -> str:
        """Return the choice in a few words: `t8 p4x2 z1 m2 full`."""
        chunks = self.num_layers_per_virtual_pipeline_stage
        words = {
            f"t{self.tensor_model_parallel_size}": True,
            f"p{self.pipeline_model_parallel_size}" + f"/{chunks}" * (chunks is not None): True,
            "zb": self.pipeline_schedule == "zero-bubble",
            f"z{self.zero_stage}": True,
            f"mics{self.mics_shard_size}": self.mics_shard_size > 0,
            f"hpz{self.zero_hpz_partition_size}": self.zero_hpz_partition_size > 1,
            "qw": self.zero_quantized_weights,
            "qg": self.zero_quantized_gradients,
            "host": self.offload_optimizer != "none",
            "host-params": self.offload_param != "none",
            f"m{self.micro_batch_size}": True,
            self.recompute_granularity: self.recompute_granularity != "none",
        }
        return " ".join(word for word, is_there in words.items() if is_there)


class AdvisedRun(NamedTuple):
    """The run that is advised on.

    kept: its words without the settings that are chosen.  left_out: flags about places of states and activations that
    are not among those that are chosen.  config: of `kept`.  given: the layout of all words.  samples: of a step.
    """

    kept: tuple[str, ...]
    left_out: tuple[str, ...]
    config: RunConfig
    given: LayoutChoice
    samples: int


def read(words: Sequence[str], world_size: int) -> AdvisedRun:
    """Return the run of `pretrain`'s flags, whose layout need not be legal; raise ConfigError for any other problem."""
    given, stray = split_words(words)
    if any(word.flag_name == "deepspeed-config" for word in given):
        rule = "an advisor chooses what such a file states"
        raise ConfigError(Problem("--advise --deepspeed-config", rule, "the run's other settings as flags"))
    chosen = {
        name.removeprefix("--"): info.name for info in FIELDS if _is_chosen(info.name) for name in spellings(info)
    }
    kept = [word for word in given if word.flag_name not in chosen]
    whole = resolve([*words, *made_up(words)])
    raise_problems(ConfigError, whole.problems)
    samples = derived.global_batch_size(whole.config, world_size) or 1
    found = [part for word in kept for part in (f"--{word.flag_name}", *word.value)]
    found += [*stray, *made_up(words)]
    base = resolve([*found, "--micro-batch-size", "1"])
    raise_problems(ConfigError, base.problems)
    others = {word.flag_name for word in given if word.flag_name in chosen}
    others -= {name for name in others if chosen[name] in (*LayoutChoice._fields, *_FURTHER)}
    left_out = tuple(f"--{name}" for name in sorted(others))
    return AdvisedRun(tuple(found), left_out, base.config, _choice_of(_plain(whole.config)), samples)


def _is_chosen(name: str) -> bool:
    return INFO[name].section in _SECTIONS or name in (*LayoutChoice._fields, *_FURTHER)


def _choice_of(config: RunConfig) -> LayoutChoice:
    return LayoutChoice(**{name: value_in(config, name) for name in LayoutChoice._fields})


def configured(config: RunConfig, choice: LayoutChoice, samples: int) -> RunConfig:
    """Return the configuration with a choice's values and a global batch."""
    return with_values(config, {"global_batch_size": samples, **choice._asdict()})


def flags(run: AdvisedRun, choice: LayoutChoice) -> tuple[str, ...]:
    """Return all words of a run with this layout."""
    base = _choice_of(run.config)._asdict() | {"micro_batch_size": None}
    words = list(run.kept)
    for name, value in choice._asdict().items():
        if value != base[name]:
            words += [INFO[name].flag] if value is True else [INFO[name].flag, str(value)]
    return (*words, "--global-batch-size", str(run.samples))


def legal(run: AdvisedRun, choice: LayoutChoice, nodes: Nodes) -> Wanted | None:
    """Return the run with this layout on these nodes as a start reads it; None where it would be refused."""
    try:
        wanted = read_run(flags(run, choice), nodes)
    except UserError:
        return None
    return wanted._replace(config=_plain(wanted.config))


def _plain(config: RunConfig) -> RunConfig:
    """Return the configuration without what "auto" would add: what an advisor chooses itself, and slices."""
    return with_values(config, {name: INFO[name].default for name in undecided(config)})


def choices(run: AdvisedRun, nodes: Nodes) -> Iterator[LayoutChoice]:
    """Yield layouts of a run on these nodes, of which a start may refuse some."""
    world = nodes.world_size
    per_node = max(nodes.ranks_per_node)
    across = run.config.parallel.allow_tensor_parallel_across_nodes
    for tensor in _divisors(world if across else per_node):
        for stages in _divisors(world // tensor) if world % tensor == 0 else ():
            layout = LayoutChoice(tensor, stages, sequence_parallel=tensor > 1)
            copies = world // tensor // stages
            refused = rules.check(configured(run.config, layout, copies), world)
            if refused and rules.check(configured(run.config, layout._replace(sequence_parallel=False), copies), world):
                continue
            if run.samples % copies:
                continue
            layout = layout._replace(sequence_parallel=tensor > 1 and not refused)
            for states in _states(copies, max(per_node // tensor, 1)):
                for chunks in _orders(run.config, stages):
                    for size in _divisors(run.samples // copies):
                        for recomputed in ("none", "selective", "full") if size <= _MOST_SAMPLES else ():
                            varied = {**states, **chunks, "recompute_granularity": recomputed}
                            yield layout._replace(micro_batch_size=size, **varied)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _orders(config: RunConfig, stages: int) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each order in which pipeline stages may compute."""
    yield MappingProxyType({})
    if stages > 1:
        yield {"pipeline_schedule": "zero-bubble"}
        for count in _CHUNKS:
            length, rest = divmod(config.model.num_layers, stages * count)
            if not rest and length:
                yield {"num_layers_per_virtual_pipeline_stage": length}


def _states(copies: int, inside: int) -> Iterator[dict[str, Any]]:
    """Yield the settings of each place of model states.  inside: the data-parallel processes of a node."""
    groups = [inside * count for count in _GROUPS if 1 < inside * count < copies and copies % (inside * count) == 0]
    for stage in (0, 1, 2, 3) if copies > 1 else (1, 3):
        away = [{}, {"offload_optimizer": "cpu"}] if stage else [{}]
        if stage == 3:
            away.append({"offload_optimizer": "cpu", "offload_param": "cpu"})
        parts: list[dict[str, Any]] = [{}]
        if stage and copies > 1:
            parts += [{"mics_shard_size": size} for size in groups]
        if copies > inside > 1 and stage == 3 and copies % inside == 0:
            parts.append({"zero_hpz_partition_size": inside})
            parts.append({"zero_hpz_partition_size": inside, "zero_quantized_weights": True})
        if copies > inside and stage:
            quantized = {"zero_quantized_gradients": True}
            parts.append({**parts[-1], **quantized} if stage == 3 else quantized)
        yield from ({"zero_stage": stage, **place, **part} for place in away for part in parts)
