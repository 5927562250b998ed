"""The configuration of the library: what `megazero.initialize(model, config)` is told about one model's training.

It has two forms.  megazero's own has the sections `zero`, `precision`, `activations`, `optimizer` and `scheduler`,
whose names and defaults are those of the dataclasses; DeepSpeed's is a published DeepSpeed configuration
(deepspeed.py).  Both may be a mapping, a JSON file or a YAML file; `load_engine_config` takes any of them and gives an
`EngineConfig` that has been checked.  What has only keys that both forms know (the optimizer's, the batch's) is read as
DeepSpeed's.  The number of processes is still unknown then: `resolve_batch` makes the batch's sizes of it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from megazero.config.batch import BatchSizes, SaidSizes, solve
from megazero.config.choices import (
    AUTO,
    LR,
    OPTIMIZERS,
    OptimizerChoice,
    SchedulerChoice,
    choose_optimizer,
    choose_scheduler,
)
from megazero.config.engine_sections import ActivationConfig, PrecisionConfig, ZeroConfig
from megazero.config.fields import STRICT, FieldInfo, describe
from megazero.config.origin import Origin
from megazero.config.values import Findings, Place, Unfit, conform, unknown, violation
from megazero.config.yaml_file import read_nested
from megazero.dialects.deepspeed.keys import ACTIVATION_KEYS, HONOURED, TOP_LEVEL, ZERO_KEYS
from megazero.dialects.deepspeed.reading import Reading, read, read_file
from megazero.dialects.deepspeed.sections import PRECISION_KEYS, EngineParts, engine_parts
from megazero.errors import ConfigError, Problem, raise_problems
from megazero.rules import moot
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
_FORMS = "zero, precision, ... of megazero, or zero_optimization, fp16, bf16, ... of DeepSpeed"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EngineConfig:
    """How one model is trained.

    gradient_clipping: largest global gradient norm; 0 clips nothing.
    gradient_accumulation_steps, train_micro_batch_size_per_gpu, train_batch_size: what was said of the batch, None
    where nothing was; `resolve_batch` gives the sizes.
    notices: what the user should know about keys without effect, one line each.
    origin: USER, or FOREIGN where a DeepSpeed configuration has set the settings.
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
    origin: Origin = Origin.USER


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
    reading.findings.notices.extend(moot.of_the_library(parts, [*_given_by_deepspeed(reading, parts)]).notices)
    plain = {name: reading.get(name, _default(name)) for name in _PLAIN}
    raise_problems(ConfigError, reading.findings.problems)
    return EngineConfig(
        zero=parts.zero,
        precision=parts.precision,
        activations=parts.activations,
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        notices=tuple(reading.findings.notices),
        origin=Origin.FOREIGN,
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
    sections_are_valid = not findings.problems
    optimizer = _optimizer(place.key("optimizer"), content.get("optimizer"), findings)
    scheduler = _scheduler(place.key("scheduler"), content.get("scheduler"), findings, optimizer.lr)
    plain = _values(infos, place, {name: content[name] for name in _PLAIN if name in content}, findings)
    parts = EngineParts(zero, precision, activations, optimizer, scheduler)
    findings.problems.extend(_problems(parts, place))
    if sections_are_valid:  # else defaults stand in for what is not
        findings.problems.extend(moot.of_the_library(parts, [*_given(parts, place)]).problems)
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


def _problems(parts: EngineParts, place: Place) -> Iterator[Problem]:
    """What is wrong between settings, by their dotted names."""

    def spell(name: str) -> str:
        return f"{'zero' if name in ZeroConfig.__dataclass_fields__ else 'precision'}.{name}"

    for problem in (problem for rule in STATE_RULES for problem in rule(parts.zero, parts.precision, spell)):
        yield replace(problem, given=f"{place}: {problem.given}")
    yield from _undecidable(parts.activations, place)


def _given(parts: EngineParts, place: Place) -> Iterator[moot.Given]:
    """The settings that have another value than their default."""
    for name in _SECTIONS:
        section = getattr(parts, name)
        for info in describe(name, type(section)):
            value = getattr(section, info.name)
            if value != info.default:
                yield moot.Given(info.name, place.key(name).key(info.name).said(value), Origin.USER)
    optimizer, known, where = parts.optimizer, OPTIMIZERS[parts.optimizer.type], place.key("optimizer")
    if optimizer.lr != known.lr:
        yield moot.Given("optimizer.lr", where.key("lr").said(optimizer.lr), Origin.USER)
    for name, value in optimizer.params.items():
        if name in known.params and value != known.params[name].default:
            yield moot.Given(f"optimizer.params.{name}", where.key("params").key(name).said(value), Origin.USER)


def _given_by_deepspeed(reading: Reading, parts: EngineParts) -> Iterator[moot.Given]:
    """The settings that keys of a DeepSpeed configuration have set; those of fp16 where it is turned on."""
    keys = {**ZERO_KEYS, **ACTIVATION_KEYS, **(PRECISION_KEYS if parts.precision.precision == "fp16" else {})}
    for setting, path in keys.items():
        parsed = reading.said(path)
        if parsed is not None:
            yield moot.Given(setting, parsed.source, Origin.FOREIGN)
    place, params = reading.place.key("optimizer").key("params"), reading.params.get("optimizer.params", {})
    for name in params:
        if params[name] != AUTO:
            setting = "optimizer.lr" if name == "lr" else f"optimizer.params.{name}"
            yield moot.Given(setting, place.key(name).said(params[name]), Origin.FOREIGN)


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
    parts = EngineParts(config.zero, config.precision, config.activations, optimizer, scheduler)
    findings.problems.extend(_problems(parts, place))
    if config.origin is Origin.USER:  # a DeepSpeed configuration has earned its notices when it was read
        findings.problems.extend(moot.of_the_library(parts, [*_given(parts, place)]).problems)
    raise_problems(ConfigError, findings.problems)
    notices = (*config.notices, *(notice for notice in findings.notices if notice not in config.notices))
    return replace(config, optimizer=optimizer, scheduler=scheduler, notices=notices)
