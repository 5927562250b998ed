"""Relates the wires that a zero.Init is given to those of the engine that takes its parameters over.

An Init sends no parameter over a quantized wire, nor does it make secondary partitions: the engine does.  So what an
Init is given, by its arguments or in its configuration, is kept with its parameters until `initialize`: it counts as
if the engine's configuration had it, and may not contradict it.  A setting at its default counts as not given.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from megazero.comm.interface import Communicator
from megazero.config.engine_sections import SETTINGS, ZeroConfig
from megazero.config.nearest import near_divisors
from megazero.errors import ConfigError, Problem, raise_problems
from megazero.library.adopted.group import rank_in_job, ranks_of
from megazero.library.config import EngineConfig, load_engine_config
from megazero.zero.plan import Placement, resolve

_SECONDARY_SIZE = "zero_hpz_partition_size"
_BLOCK = "zero_quantized_block_size"
# {setting: those of the form of what it has quantized}
_FORMS = MappingProxyType(
    {
        "zero_quantized_weights": ("zero_quantized_weights_bits", _BLOCK, "zero_quantized_stochastic"),
        "zero_quantized_nontrainable_weights": (_BLOCK,),
    }
)
_NAMES = (*_FORMS, *dict.fromkeys(name for form in _FORMS.values() for name in form), _SECONDARY_SIZE)
_DEFAULTS = MappingProxyType({info.name: info.default for info in SETTINGS[ZeroConfig] if info.name in _NAMES})


@dataclass(frozen=True)
class GivenWires:
    """The wires that an Init has been given.

    settings: names and values of those in the section `zero` that are not at their defaults.
    group: the ranks, in the job, of zero_param_parallel_group; () if there is none.
    """

    settings: tuple[tuple[str, Any], ...] = ()
    group: tuple[int, ...] = ()


def wires_of_config(zero: ZeroConfig) -> GivenWires:
    """Return the wires that a configuration asks for."""
    forms = {name for switch, form in _FORMS.items() if getattr(zero, switch) for name in form}
    values = {name: getattr(zero, name) for name in (*_FORMS, *forms, _SECONDARY_SIZE)}
    return GivenWires(tuple((name, value) for name, value in values.items() if value != _DEFAULTS[name]))


def wires_of_arguments(switches: Mapping[str, bool], group: Any) -> GivenWires:
    """Return the wires that the arguments of an Init ask for; switches: by setting; group: torch's, or None."""
    ranks = () if group is None else ranks_of(group)
    weights = {name: True for name, is_on in switches.items() if is_on}
    size = {_SECONDARY_SIZE: len(ranks)} if len(ranks) > 1 else {}
    return GivenWires(tuple({**weights, **size}.items()), ranks)


def with_wires(config: EngineConfig, given: Collection[GivenWires]) -> EngineConfig:
    """Return the engine's configuration with the wires of its parameters' Inits, checked; raise ConfigError."""
    wanted: dict[str, Any] = {}
    problems: list[Problem] = []
    for wires in given:
        problems.extend(_contradictions(config, wires, wanted))
        wanted.update(wires.settings)
    raise_problems(ConfigError, problems)
    missing = {name: value for name, value in wanted.items() if value != getattr(config.zero, name)}
    return load_engine_config(replace(config, zero=replace(config.zero, **missing))) if missing else config


def check_groups(given: Collection[GivenWires], data: Communicator, device: torch.device) -> None:
    """Raise ConfigError on every rank unless each group consists, on each rank, of neighbours like secondary groups.

    given: with groups of one size, as `with_wires` leaves them.  data: of the processes over which parameters are
    partitioned.  A collective call where there are groups.
    """
    for ranks in sorted({wires.group for wires in given if wires.group}):
        row = [rank_in_job(), len(ranks), *ranks[: data.size]]
        row += [-1] * (data.size + 2 - len(row))
        table = torch.empty(data.size * len(row), dtype=torch.int64, device=device)
        data.all_gather_into(table, torch.tensor(row, device=device)).wait()
        raise_problems(ConfigError, _group_problems(table.view(data.size, -1).tolist()))


def _contradictions(config: EngineConfig, wires: GivenWires, wanted: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each setting that has another value elsewhere, or that the engine has no use for.

    wanted: the settings of the Inits before.
    """
    gathers = resolve(config.zero, config.precision).parameter.placement is Placement.PARTITIONED
    for name, value in wires.settings:
        engine = getattr(config.zero, name)
        if wanted.get(name, value) != value:
            given = f"zero.Init with {name} {value}, and another with {wanted[name]}"
            yield Problem(given, "an engine has one kind of wires for all its parameters", f"{name} {value} in both")
        elif engine not in (value, _DEFAULTS[name]):
            given = f"{name} {engine} for parameters of a zero.Init with {value}"
            rule = "the configuration has the wires that its parameters' zero.Init was given"
            yield Problem(given, rule, f"{name} {value}, or zero.Init with {engine}")
        elif engine != value and not gathers:
            given = f"zero.Init with {name} {value} for an engine with whole parameters"
            yield Problem(given, "only partitioned parameters are gathered for use", f"stage 3, or no {name}")


def _group_problems(rows: Sequence[list[int]]) -> Iterator[Problem]:
    """Yield the problem of the first rank whose group is not a secondary one.

    rows: of each data-parallel rank in order: its rank in the job, the size of its group, and the ranks in it.
    """
    data, size = [row[0] for row in rows], rows[0][1]
    for place, (rank, own_size, *ranks) in enumerate(rows):
        first = place // size * size
        is_alone = size == 1 < len(data)
        if is_alone or own_size != size or len(data) % size or ranks[:size] != data[first : first + size]:
            least = min(len(data), 2)
            fits = own_size >= least and len(data) % own_size == 0
            sizes = (own_size,) if fits else near_divisors(len(data), own_size)
            legal = " or ".join(str(data[place // near * near :][:near]) for near in sizes if near >= least)
            given = f"zero_param_parallel_group of ranks {ranks[:own_size]} on rank {rank}"
            rule = (
                f"it is the group of a secondary partition (zero_hpz_partition_size): the data-parallel ranks {data}"
                " are divided into groups of neighbours, all of one size"
            )
            yield Problem(given, rule, f"a group of ranks {legal} on rank {rank}")
            return
