"""The configuration of the library: what `megazero.initialize(model, config)` is told about one model's training.

It has two forms.  megazero's own has the sections `zero`, `precision`, `activations`, `optimizer` and `scheduler`,
whose names and defaults are those of the dataclasses; DeepSpeed's is a published DeepSpeed configuration
(deepspeed.py).  Both may be a mapping, a JSON file or a YAML file; `load_engine_config` takes any of them and gives an
`EngineConfig` that has been checked.  What has only keys that both forms know (the optimizer's, the batch's) is read as
DeepSpeed's.  The number of processes is still unknown then: `resolve_batch` makes the batch's sizes of it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from megazero.config.batch import BatchSizes, SaidSizes, solve
from megazero.config.choices import OptimizerChoice, SchedulerChoice, choose_optimizer, choose_scheduler
from megazero.config.engine_sections import ActivationConfig, PrecisionConfig, ZeroConfig
from megazero.config.fields import STRICT, FieldInfo, describe
from megazero.config.optimizers import LR
from megazero.config.values import Findings, Place, Unfit, conform, unknown, violation
from megazero.config.yaml_file import read_nested
from megazero.dialects.deepspeed.keys import HONOURED, TOP_LEVEL
from megazero.dialects.deepspeed.reading import Reading, read, read_file
from megazero.dialects.deepspeed.sections import engine_parts
from megazero.errors import ConfigError, Problem, raise_problems
from megazero.rules.activations import count_has_an_arena
from megazero.rules.states import STATE_RULES

__all__ = [
    "BatchSizes",
    "EngineConfig",
    "OptimizerChoice",
    "SchedulerChoice",
    "load_engine_config",
    "resolve_batch",
]

_Count = Annotated[int, Field(ge=1)]
_Section = TypeVar("_Section", bound=ZeroConfig | PrecisionConfig | ActivationConfig)

# Keys that both forms have, besides the optimizer and the scheduler.
_PLAIN = (
    "gradient_clipping",
    "gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
)
_SECTIONS = ("zero", "precision", "activations")
# What a run says of its model; here the model says it.
_OF_THE_MODEL = ("recompute_granularity", "recompute_method", "recompute_num_layers", "logits_chunk_bytes")
# What a run says of its schedule; here the program calls forward and backward as it likes.
_OF_A_SCHEDULE = ("zero3_reshard_after",)
_OF_THE_LAYERS = ("fp8_format",)
_FORMS = "zero, precision, ... of megazero, or zero_optimization, fp16, bf16, ... of DeepSpeed"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EngineConfig:
    """How one model is trained.

    gradient_clipping: largest global gradient norm; 0 clips nothing.
    gradient_accumulation_steps, train_micro_batch_size_per_gpu, train_batch_size: what was said of the batch, None
    where nothing was; `resolve_batch` gives the sizes.
    notices: what the user should know about keys without effect, one line each.
    """

    zero: ZeroConfig = field(default_factory=ZeroConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    optimizer: OptimizerChoice = field(default_factory=OptimizerChoice)
    scheduler: SchedulerChoice | None = None
    gradient_clipping: Annotated[float, Field(ge=0)] = 0.0
    gradient_accumulation_steps: _Count | None = None
    train_micro_batch_size_per_gpu: _Count | None = None
    train_batch_size: _Count | None = None
    notices: tuple[str, ...] = ()


def load_engine_config(config: EngineConfig | Mapping[str, Any] | str | Path) -> EngineConfig:
    """The configuration, checked and complete; raises ConfigError with everything that is wrong."""
    if isinstance(config, EngineConfig):
        return _checked(config)
    if isinstance(config, Mapping):
        return _from_mapping(config, "config")
    path = Path(config)
    readers = {".json": read_file, ".yaml": read_nested, ".yml": read_nested}
    if path.suffix not in readers:
        rule = "a configuration is a .json or a .yaml file"
        raise ConfigError(Problem(str(config), rule, ", ".join(str(path.with_suffix(suffix)) for suffix in readers)))
    return _from_mapping(readers[path.suffix](path), str(path))


def resolve_batch(config: EngineConfig, data_parallel_size: int) -> BatchSizes:
    """The batch's sizes on so many data-parallel processes; raises ConfigError when they contradict each other."""
    said = SaidSizes(config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)
    sizes = solve(said, data_parallel_size)
    if isinstance(sizes, Problem):
        raise ConfigError(sizes)
    return sizes


def _from_mapping(content: Mapping[str, Any], origin: str) -> EngineConfig:
    own = [name for name in _SECTIONS if name in content]
    foreign = [name for name in content if name in TOP_LEVEL - {"optimizer", "scheduler", *_PLAIN}]
    if own and foreign:
        given = f"{origin}: {', '.join(own)} beside {', '.join(foreign)}"
        raise ConfigError(Problem(given, "a configuration has one form", _FORMS))
    optimizer = content.get("optimizer")
    if own or not content or (isinstance(optimizer, Mapping) and "lr" in optimizer and not foreign):
        return _from_own(content, Place(origin))
    return _from_deepspeed(read(content, origin))


# --- DeepSpeed's form ------------------------------------------------------------------------------------------------


def _from_deepspeed(reading: Reading) -> EngineConfig:
    parts = engine_parts(reading)
    reading.findings.problems.extend(_undecidable(parts.activations, Place(reading.origin)))
    plain = {name: reading.get(name, _default(name)) for name in _PLAIN}
    raise_problems(ConfigError, reading.findings.problems)
    return EngineConfig(
        zero=parts.zero,
        precision=parts.precision,
        activations=parts.activations,
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        notices=tuple(reading.findings.notices),
        **plain,
    )


def _default(name: str) -> Any:
    return EngineConfig.__dataclass_fields__[name].default


# --- megazero's own form ---------------------------------------------------------------------------------------------


def _from_own(content: Mapping[str, Any], place: Place) -> EngineConfig:
    findings = Findings()
    infos = {name: HONOURED[name] for name in _PLAIN}
    known = (*_SECTIONS, "optimizer", "scheduler", *_PLAIN)
    findings.problems.extend(unknown(place.key(name), content[name], known) for name in content if name not in known)
    zero = _section(ZeroConfig, place.key("zero"), content.get("zero"), findings)
    precision = _section(PrecisionConfig, place.key("precision"), content.get("precision"), findings)
    activations = _section(ActivationConfig, place.key("activations"), content.get("activations"), findings)
    optimizer = _optimizer(place.key("optimizer"), content.get("optimizer"), findings)
    scheduler = _scheduler(place.key("scheduler"), content.get("scheduler"), findings, optimizer.lr)
    plain = _values(infos, place, {name: content[name] for name in _PLAIN if name in content}, findings)
    findings.problems.extend(_state_problems(zero, precision, place))
    findings.problems.extend(_activation_problems(activations, place))
    raise_problems(ConfigError, findings.problems)
    return EngineConfig(
        zero=zero,
        precision=precision,
        activations=activations,
        optimizer=optimizer,
        scheduler=scheduler,
        notices=tuple(findings.notices),
        **plain,
    )


def _mapping(place: Place, value: Any, findings: Findings) -> Mapping[str, Any]:
    """The value as a section; an empty one stands in for what is none."""
    if isinstance(value, Mapping):
        return value
    if value is not None:
        findings.problems.append(Problem(place.said(value), f"{place.path} is a mapping", "{...}"))
    return {}


def _section(cls: type[_Section], place: Place, value: Any, findings: Findings) -> _Section:
    if isinstance(value, cls):
        return value
    fields: tuple[FieldInfo, ...] = describe("", cls)
    infos = {name.replace("-", "_"): info for info in fields for name in (info.name, *info.aliases)}
    return cls(**_values(infos, place, _mapping(place, value, findings), findings))


def _values(
    infos: Mapping[str, FieldInfo], place: Place, said: Mapping[str, Any], findings: Findings
) -> dict[str, Any]:
    """The values of settings by their names; `infos` may have several names for one."""
    values: dict[str, Any] = {}
    for name, value in said.items():
        where, info = place.key(str(name)), infos.get(name)
        if info is None:
            findings.problems.append(unknown(where, value, infos))
        elif info.name in values:
            findings.problems.append(Problem(where.said(value), f"{info.name} stands there already", "once"))
        elif value is not None or info.required or info.default is not None:
            try:
                values[info.name] = conform(info, value)
            except Unfit:
                findings.problems.append(violation(where, info, value))
    return values


def _optimizer(place: Place, value: Any, findings: Findings) -> OptimizerChoice:
    section = _mapping(place, value, findings)
    names = ("type", "lr", "params")
    findings.problems.extend(unknown(place.key(str(n)), section[n], names) for n in section if n not in names)
    params = dict(_mapping(place.key("params"), section.get("params"), findings))
    if "lr" in params:
        said = place.key("params").key("lr").said(params.pop("lr"))
        findings.problems.append(Problem(said, "the learning rate stands beside the type", "optimizer.lr"))
    choice = choose_optimizer(place, section.get("type", "AdamW"), params, findings, defaults={})
    given = _values({"lr": LR}, place, {"lr": section["lr"]} if "lr" in section else {}, findings)
    return replace(choice, **given)


def _scheduler(place: Place, value: Any, findings: Findings, lr: float) -> SchedulerChoice | None:
    section = _mapping(place, value, findings)
    if not section:
        return None
    names = ("type", "params")
    findings.problems.extend(unknown(place.key(str(n)), section[n], names) for n in section if n not in names)
    params = _mapping(place.key("params"), section.get("params"), findings)
    return choose_scheduler(place, section.get("type"), params, findings, lr=lr)


def _state_problems(zero: ZeroConfig, precision: PrecisionConfig, place: Place) -> list[Problem]:
    """Problems between the settings of the two sections, by their dotted names."""
    zero_names = {info.name for info in describe("", ZeroConfig)}

    def spell(name: str) -> str:
        return f"{'zero' if name in zero_names else 'precision'}.{name}"

    found = [problem for rule in STATE_RULES for problem in rule(zero, precision, spell)]
    rule = "there is no schedule whose windows would be known; a unit goes after every forward and backward of it"
    return [
        *(replace(problem, given=f"{place}: {problem.given}") for problem in found),
        *_left_to_others(zero, _OF_A_SCHEDULE, place.key("zero"), rule),
        *_left_to_others(precision, _OF_THE_LAYERS, place.key("precision"), "the model's layers choose their products"),
    ]


def _activation_problems(activations: ActivationConfig, place: Place) -> Iterator[Problem]:
    """What the model says itself, and a number of checkpoints that lie nowhere."""
    rule = "the model says what is recomputed, by calling megazero.recompute(function, *args)"
    yield from _left_to_others(activations, _OF_THE_MODEL, place.key("activations"), rule)
    for problem in count_has_an_arena(activations, lambda name: f"activations.{name}"):
        yield replace(problem, given=f"{place}: {problem.given}")
    yield from _undecidable(activations, place)


def _left_to_others(section: _Section, names: Iterable[str], place: Place, rule: str) -> Iterator[Problem]:
    """What stands in `section` under names that only a run has a use for."""
    for info in describe("", type(section)):
        value = getattr(section, info.name)
        if info.name in names and value != info.default:
            yield Problem(place.key(info.name).said(value), f"refused: {rule}", f"leave out {info.name}")


def _undecidable(activations: ActivationConfig, place: Place) -> Iterator[Problem]:
    """Switches on "auto", which a run of `pretrain_gpt.py` decides by the sizes of its own model."""
    for name in ("partition_activations", "checkpoint_in_cpu"):
        if getattr(activations, name) == "auto":
            rule = f"{name} is decided by the size of checkpoints, which is not known before the model runs"
            yield Problem(f'{place}: activations: {name} "auto"', rule, "true, false")


def _checked(config: EngineConfig) -> EngineConfig:
    """A configuration made in Python: its sections are valid one by one; the names and what is between them are not."""
    findings, place = Findings(), Place("config")
    optimizer = choose_optimizer(
        place.key("optimizer"), config.optimizer.type, config.optimizer.params, findings, defaults={}
    )
    optimizer = replace(optimizer, lr=config.optimizer.lr)
    scheduler = config.scheduler
    if scheduler is not None:
        where = place.key("scheduler")
        scheduler = choose_scheduler(where, scheduler.type, scheduler.params, findings, lr=optimizer.lr)
    findings.problems.extend(_state_problems(config.zero, config.precision, place))
    findings.problems.extend(_activation_problems(config.activations, place))
    raise_problems(ConfigError, findings.problems)
    notices = (*config.notices, *(notice for notice in findings.notices if notice not in config.notices))
    return replace(config, optimizer=optimizer, scheduler=scheduler, notices=notices)
