"""The configuration of the library, with which `megazero.initialize(model, config)` trains one model.

It has two forms.  megazero's own has the sections `zero`, `precision`, `activations`, `limits`, `curriculum`,
`optimizer` and `scheduler`, whose names and defaults are those of the dataclasses; DeepSpeed's is a published DeepSpeed
configuration (megazero/dialects/deepspeed).  Both may be a mapping, a JSON file or a YAML file; `load_engine_config`
takes any of them and returns an `EngineConfig` that has been checked.  A configuration with only keys that both forms
have (the optimizer's, the batch's) is read as DeepSpeed's.  The number of processes is still unknown then:
`resolve_batch` computes the batch's sizes from it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from megazero.config.batch import KEYS, BatchSizes, GivenSizes, solve
from megazero.config.choices import (
    OptimizerChoice,
    SchedulerChoice,
    changed_params,
    choose_optimizer,
    choose_param_groups,
    choose_scheduler,
)
from megazero.config.curriculum import CurriculumConfig, read_curriculum
from megazero.config.engine_sections import (
    SETTINGS,
    ActivationConfig,
    LimitConfig,
    PrecisionConfig,
    ReportConfig,
    ZeroConfig,
)
from megazero.config.fields import STRICT, FieldInfo, by_name, parameter
from megazero.config.optimizers import LR
from megazero.config.origin import Origin
from megazero.config.values import (
    Diagnostics,
    InvalidValue,
    Location,
    ParsedValue,
    coerce,
    shown,
    unknown,
    violation,
)
from megazero.config.yaml_file import read_nested
from megazero.dialects.deepspeed.keys import AUTOCAST, HONOURED, TOP_LEVEL, key
from megazero.dialects.deepspeed.reading import ParsedFile, read, read_file
from megazero.dialects.deepspeed.sections import EngineParts, engine_parts
from megazero.errors import ConfigError, Problem, raise_problems
from megazero.rules import moot
from megazero.rules.states import STATE_RULES, optimizer_fits

__all__ = [
    "BatchSizes",
    "EngineConfig",
    "OptimizerChoice",
    "SchedulerChoice",
    "load_engine_config",
    "resolve_batch",
]

_Count = Annotated[int, Field(ge=1)]
_Section = TypeVar(
    "_Section", bound=ZeroConfig | PrecisionConfig | ActivationConfig | LimitConfig | ReportConfig | CurriculumConfig
)

# Keys that both forms have, besides the optimizer and the scheduler.
_PLAIN = (
    "gradient_clipping",
    "gradient_allreduce_op",
    "gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
    "keep_in_fp32",
    "steps_per_print",
)
# Keys of megazero's own form only.
_OWN = MappingProxyType(
    {
        "update_unused_parameters": key("update_unused_parameters", "bool", False),
        "autocast": key("autocast", "str", None, choices=AUTOCAST),
    }
)
# Keys of the optimizer's section in megazero's own form, beside type, lr and params.
_DECOUPLED = by_name(
    parameter("decoupled_lr", "float", None, optional=True, gt=0),
    parameter("decoupled_parameters", "list", (), optional=True),
)
_GROUPS = parameter("param_groups", "list", (), optional=True)
# {key of megazero's form: DeepSpeed's}
_RENAMED = MappingProxyType({"buffer_dtype": "data_types.buffer_dtype"})
_HOMES = ("offload_optimizer", "offload_param")  # a run decides them, if they are "auto"
_SECTIONS = ("zero", "precision", "activations", "reports", "curriculum")
_OWN_SECTIONS = (*_SECTIONS, "limits")  # the sections of megazero's own form, besides those that both forms have
_FORMS = "zero, precision, ... of megazero, or zero_optimization, fp16, bf16, ... of DeepSpeed"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EngineConfig:
    """The settings by which an engine trains one model.

    optimizer: None: without one given to `initialize` either, the engine computes and trains nothing.
    gradient_clipping: largest global gradient norm; 0 clips nothing.
    gradient_allreduce_op: a step's gradients are the mean over the data-parallel processes, or their sum.
    autocast: the format in which torch.autocast lets the forward of a model in fp32 compute; None: without.  fp16 has
    the loss scale of `precision`.
    gradient_accumulation_steps, train_micro_batch_size_per_gpu, train_batch_size: the batch's sizes as they are given,
    None where they are not; `resolve_batch` returns all of them.
    update_unused_parameters: True if the optimizer also updates parameters of which no rank has a gradient, as
    DeepSpeed does: their gradient counts as zero, by which moments and weights decay.  False leaves them alone, as
    torch does.
    buffer_dtype: number format of floating-point buffers; None: each keeps its own.
    keep_in_fp32: parameters, buffers and modules that bf16 and fp16 leave in fp32, by name (`module/formats.py`).
    notices: one-line texts about keys without effect and keys that are "auto".
    automatic_sizes: sizes of the batch that are "auto" in a DeepSpeed configuration, as messages name them.
    origin: USER, or FOREIGN where a DeepSpeed configuration has set the settings.
    limits: how long processes wait for each other; for programs whose processes `initialize` joins.
    reports: what is reported about the steps, every `steps_per_print` of them.
    curriculum: the length to which the program, or its model, cuts the rows of a step (`engine.curriculum_seqlen`).
    """

    zero: ZeroConfig = field(default_factory=ZeroConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    optimizer: OptimizerChoice | None = None
    scheduler: SchedulerChoice | None = None
    gradient_clipping: Annotated[float, Field(ge=0)] = 0.0
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    autocast: Literal["bf16", "fp16"] | None = None
    gradient_accumulation_steps: _Count | None = None
    train_micro_batch_size_per_gpu: _Count | None = None
    train_batch_size: _Count | None = None
    update_unused_parameters: bool = False
    buffer_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    keep_in_fp32: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    automatic_sizes: tuple[str, ...] = ()
    origin: Origin = Origin.USER
    limits: LimitConfig = field(default_factory=LimitConfig)
    reports: ReportConfig = field(default_factory=ReportConfig)
    steps_per_print: _Count = 10
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)

    @property
    def scales_loss(self) -> bool:
        """True if gradients are made in fp16, in which small ones would be zero without a loss scale."""
        return "fp16" in (self.precision.precision, self.autocast)


def load_engine_config(config: EngineConfig | Mapping[str, Any] | str | Path) -> EngineConfig:
    """Return the configuration, checked and complete; raise ConfigError with all problems."""
    if isinstance(config, EngineConfig):
        return _checked(config)
    if isinstance(config, Mapping):
        return _from_mapping(config, "config")
    if not isinstance(config, str | Path):
        rule = "a configuration is a mapping, or the path of a .json or a .yaml file"
        raise ConfigError(Problem(f"config of type {type(config).__name__}", rule, _FORMS))
    path = Path(config)
    readers = {".json": read_file, ".yaml": read_nested, ".yml": read_nested}
    if path.suffix not in readers:
        rule = "a configuration is a .json or a .yaml file"
        raise ConfigError(Problem(str(config), rule, ", ".join(str(path.with_suffix(suffix)) for suffix in readers)))
    return _from_mapping(readers[path.suffix](path), str(path))


def without_training(config: EngineConfig) -> EngineConfig:
    """Return the configuration without what an optimizer alone needs, if there is none; `initialize` is given no other.

    Raises ConfigError for a schedule, or a home of states, without an optimizer; a DeepSpeed configuration's get
    notices instead.
    """
    if config.optimizer is not None:
        return config
    location, is_own, moot = Location("config"), config.origin is Origin.USER, {}
    if config.scheduler is not None:
        moot[location.key("scheduler.type").quote(config.scheduler.type)] = "whose learning rate it would set"
    if (home := config.zero.offload_optimizer) != "none":
        name = "zero.offload_optimizer" if is_own else "zero_optimization.offload_optimizer.device"
        moot[location.key(name).quote(home)] = "whose states would live there"
    legal = 'optimizer: {"type": "AdamW"}, or initialize(model, config, optimizer=...)'
    because = {given: f"there is no optimizer {of_it}" for given, of_it in moot.items()}
    if is_own:
        rule = "it has no effect here: "
        raise_problems(ConfigError, [Problem(given, f"{rule}{reason}", legal) for given, reason in because.items()])
    zero = replace(config.zero, offload_optimizer="none", delayed_parameter_update=False)
    notices = (f"{given}: moot here, because {reason}" for given, reason in because.items())
    return replace(config, zero=zero, scheduler=None, notices=(*config.notices, *notices))


def without_optimizer(config: EngineConfig, given: object) -> EngineConfig:
    """Return the configuration without its optimizer; `given` is the one that is given to `initialize` beside it.

    Raises ConfigError for two optimizers; a DeepSpeed configuration's gets a notice instead, as DeepSpeed prefers the
    program's.
    """
    if config.optimizer is None:
        return config
    described = Location("config").key("optimizer.type").quote(config.optimizer.type)
    argument = f"initialize(optimizer={getattr(given, '__name__', type(given).__name__)})"
    if config.origin is Origin.USER:
        legal = "leave out the configuration's optimizer, or initialize(model, config) without one"
        raise ConfigError(Problem(f"{described} beside {argument}", "a training has one optimizer", legal))
    because = f"{argument} gives the one optimizer that a training has"
    return replace(config, optimizer=None, notices=(*config.notices, f"{described}: moot here, because {because}"))


def resolve_batch(config: EngineConfig, data_parallel_size: int) -> BatchSizes:
    """Return the batch's sizes on this many data-parallel processes; raise ConfigError if they contradict."""
    given = GivenSizes(
        config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    )
    sizes = solve(given, data_parallel_size)
    if isinstance(sizes, Problem):
        raise ConfigError(sizes)
    return sizes


def automatic_sizes(config: EngineConfig, sizes: BatchSizes) -> tuple[str, ...]:
    """Return one line, with the resulting value, for each size of the batch that is "auto" in a DeepSpeed file."""
    became = {KEYS["train"]: sizes.train, KEYS["micro"]: sizes.micro, KEYS["accumulation"]: sizes.accumulation}
    texts = {
        name: "the size of what the program passes" if size is None else shown(size) for name, size in became.items()
    }
    return tuple(f'{name}: "auto" became {texts[name.rpartition(" ")[2]]}' for name in config.automatic_sizes)


def _from_mapping(content: Mapping[str, Any], origin: str) -> EngineConfig:
    own = [name for name in (*_OWN_SECTIONS, *_OWN) if name in content]
    foreign = [name for name in content if name in TOP_LEVEL - {"optimizer", "scheduler", *_PLAIN}]
    if own and foreign:
        given = f"{origin}: {', '.join(own)} beside {', '.join(foreign)}"
        raise ConfigError(Problem(given, "a configuration has one form", _FORMS))
    optimizer = content.get("optimizer")
    if own or not content or (isinstance(optimizer, Mapping) and "lr" in optimizer and not foreign):
        return _from_own(content, Location(origin))
    return _from_deepspeed(read(content, origin))


# --- DeepSpeed's form ------------------------------------------------------------------------------------------------


def _from_deepspeed(file: ParsedFile) -> EngineConfig:
    parts = engine_parts(file)
    file.diagnostics.problems.extend(_undecidable(parts.zero, parts.activations, file.location()))
    file.diagnostics.problems.extend(_decoupled_problems(parts.optimizer, parts.scheduler, file.location()))
    paths = {name: name for name in _PLAIN} | dict(_RENAMED)
    plain = {name: file.get(path, _default(name)) for name, path in paths.items()}
    if "gradient_clipping" not in file.values:
        file.diagnostics.notices.append(
            f"{file.location('gradient_clipping')}: left out, so DeepSpeed's documented default of"
            f" {plain['gradient_clipping']:g} holds; a configuration of megazero's own clips nothing by default"
        )
    file.diagnostics.problems.extend(
        _autocast_problems(parts.autocast, parts.precision, file.location("torch_autocast"))
    )
    raise_problems(ConfigError, file.diagnostics.problems)
    return EngineConfig(
        zero=parts.zero,
        precision=parts.precision,
        activations=parts.activations,
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        notices=tuple(file.diagnostics.notices),
        automatic_sizes=tuple(str(file.location(name)) for name in KEYS.values() if file.is_automatic(name)),
        autocast=parts.autocast,
        origin=Origin.FOREIGN,
        update_unused_parameters=True,
        reports=parts.reports,
        curriculum=parts.curriculum,
        **plain,
    )


def _default(name: str) -> Any:
    return EngineConfig.__dataclass_fields__[name].default


# --- megazero's own form ---------------------------------------------------------------------------------------------


def _from_own(content: Mapping[str, Any], location: Location) -> EngineConfig:
    diagnostics = Diagnostics()
    shared = {name: HONOURED[path] for name, path in (*zip(_PLAIN, _PLAIN, strict=True), *_RENAMED.items())}
    infos = {**shared, **_OWN}
    known = (*_OWN_SECTIONS, "optimizer", "scheduler", *infos)
    diagnostics.problems.extend(
        unknown(location.key(name), content[name], known) for name in content if name not in known
    )
    zero = _section(ZeroConfig, location.key("zero"), content.get("zero"), diagnostics)
    precision = _section(PrecisionConfig, location.key("precision"), content.get("precision"), diagnostics)
    activations = _section(ActivationConfig, location.key("activations"), content.get("activations"), diagnostics)
    limits = _section(LimitConfig, location.key("limits"), content.get("limits"), diagnostics)
    reports = _section(ReportConfig, location.key("reports"), content.get("reports"), diagnostics)
    curriculum = _section(CurriculumConfig, location.key("curriculum"), content.get("curriculum"), diagnostics)
    sections_are_valid = not diagnostics.problems
    optimizer = _optimizer(location.key("optimizer"), content.get("optimizer"), diagnostics)
    lr = None if optimizer is None else optimizer.lr
    scheduler = _scheduler(location.key("scheduler"), content.get("scheduler"), diagnostics, lr)
    plain = _values(infos, location, {name: content[name] for name in infos if name in content}, diagnostics)
    parts = EngineParts(zero, precision, activations, optimizer, scheduler, plain.get("autocast"), reports, curriculum)
    diagnostics.problems.extend(_problems(parts, location))
    diagnostics.problems.extend(_autocast_problems(plain.get("autocast"), precision, location.key("autocast")))
    if sections_are_valid:  # else defaults stand in for invalid values
        diagnostics.problems.extend(_moot(parts, location, plain))
    raise_problems(ConfigError, diagnostics.problems)
    return EngineConfig(
        zero=zero,
        precision=precision,
        activations=activations,
        optimizer=optimizer,
        scheduler=scheduler,
        notices=tuple(diagnostics.notices),
        limits=limits,
        reports=reports,
        curriculum=curriculum,
        **plain,
    )


def _mapping(location: Location, value: Any, diagnostics: Diagnostics) -> Mapping[str, Any]:
    """Return the value if it is a mapping, else an empty one; any value but None is then added as a problem."""
    if isinstance(value, Mapping):
        return value
    if value is not None:
        diagnostics.problems.append(Problem(location.quote(value), f"{location.path} is a mapping", "{...}"))
    return {}


def _section(cls: type[_Section], location: Location, value: Any, diagnostics: Diagnostics) -> _Section:
    if isinstance(value, cls):
        return value
    infos = {name.replace("-", "_"): info for info in SETTINGS[cls] for name in (info.name, *info.aliases)}
    return cls(**_values(infos, location, _mapping(location, value, diagnostics), diagnostics))


def _values(
    infos: Mapping[str, FieldInfo], location: Location, raw: Mapping[str, Any], diagnostics: Diagnostics
) -> dict[str, Any]:
    """Return the values by the names of their settings; `infos` may have several names for one setting."""
    values: dict[str, Any] = {}
    for name, value in raw.items():
        where, info = location.key(str(name)), infos.get(name)
        if info is None:
            diagnostics.problems.append(unknown(where, value, infos))
        elif info.name in values:
            diagnostics.problems.append(Problem(where.quote(value), f"{info.name} stands there already", "once"))
        else:
            try:
                values[info.name] = coerce(info, value)
            except InvalidValue:
                diagnostics.problems.append(violation(where.quote(value), where.path, _decidable(info), value))
    return values


def _decidable(info: FieldInfo) -> FieldInfo:
    """Return a setting without the choice "auto" if only a run can decide it."""
    return (
        replace(info, choices=tuple(each for each in info.choices if each != "auto")) if info.name in _HOMES else info
    )


def _optimizer(location: Location, value: Any, diagnostics: Diagnostics) -> OptimizerChoice | None:
    section = _mapping(location, value, diagnostics)
    if not section:
        return None
    names = ("type", "lr", "params", *_DECOUPLED, _GROUPS.name)
    diagnostics.problems.extend(unknown(location.key(str(n)), section[n], names) for n in section if n not in names)
    params = dict(_mapping(location.key("params"), section.get("params"), diagnostics))
    if "lr" in params:
        quoted = location.key("params").key("lr").quote(params.pop("lr"))
        diagnostics.problems.append(Problem(quoted, "the learning rate stands beside the type", "optimizer.lr"))
    choice = choose_optimizer(location, section.get("type", "AdamW"), params, diagnostics, defaults={})
    infos = {"lr": LR, **_DECOUPLED, _GROUPS.name: _GROUPS}
    given = _values(infos, location, {name: section[name] for name in infos if name in section}, diagnostics)
    texts = given.pop(_GROUPS.name, None) or ()
    groups = choose_param_groups(location.key(_GROUPS.name), texts, choice.type, diagnostics)
    return replace(choice, **given, param_groups=groups)


def _scheduler(location: Location, value: Any, diagnostics: Diagnostics, lr: float | None) -> SchedulerChoice | None:
    section = _mapping(location, value, diagnostics)
    if not section:
        return None
    names = ("type", "params")
    diagnostics.problems.extend(unknown(location.key(str(n)), section[n], names) for n in section if n not in names)
    params = _mapping(location.key("params"), section.get("params"), diagnostics)
    return choose_scheduler(location, section.get("type"), params, diagnostics, lr=lr, in_library=True)


def _problems(parts: EngineParts, location: Location) -> Iterator[Problem]:
    """Yield the problems between settings, which are quoted by their dotted names."""

    def spell(name: str) -> str:
        return f"{'zero' if name in ZeroConfig.__dataclass_fields__ else 'precision'}.{name}"

    for problem in (problem for rule in STATE_RULES for problem in rule(parts.zero, parts.precision, spell)):
        yield replace(problem, given=f"{location}: {problem.given}")
    if parts.optimizer is not None:
        kind, params = parts.optimizer.type, parts.optimizer.params
        for problem in optimizer_fits(kind, params, f"optimizer.type {kind}", parts.zero, parts.precision, spell):
            yield replace(problem, given=f"{location}: {problem.given}")
    yield from _undecidable(parts.zero, parts.activations, location)
    yield from _decoupled_problems(parts.optimizer, parts.scheduler, location)
    if parts.curriculum.curriculum_learning:
        found = read_curriculum(parts.curriculum, None, lambda name: f"curriculum.{name}:")
        if isinstance(found, Problem):
            yield replace(found, given=f"{location}: {found.given}")


def _decoupled_problems(
    optimizer: OptimizerChoice | None, scheduler: SchedulerChoice | None, location: Location
) -> Iterator[Problem]:
    """Yield a problem for each part of a decoupled rate without the others, and for ends above the rate."""
    rate = None if optimizer is None else optimizer.decoupled_lr
    names = () if optimizer is None else optimizer.decoupled_parameters
    section = location.key("optimizer")
    if names and rate is None:
        given = section.key("decoupled_parameters").quote(list(names))
        yield Problem(f"{given} without decoupled_lr", "a decoupled rate has parameters", "decoupled_lr: 0.001")
    if rate is not None and not names:
        given = section.key("decoupled_lr").quote(rate)
        yield Problem(given, "a decoupled rate has parameters", 'decoupled_parameters: ["embedding", "head"]')
    if optimizer is not None and optimizer.param_groups:
        given = section.key("param_groups").quote([group.pattern for group in optimizer.param_groups])
        if rate is not None:
            rule = "param groups have rates of their own, also in place of a decoupled one"
            yield Problem(f"{given} with decoupled_lr", rule, f'"embedding.* lr={rate:g}" among param_groups')
        if not optimizer.lr and any(group.lr is not None for group in optimizer.param_groups):
            yield Problem(f"{given} with lr: 0", "a rate of a param group is a multiple of lr", "lr: 0.001")
    least = None if scheduler is None else scheduler.decoupled_min_lr
    if scheduler is None or least is None:
        return
    given = location.key("scheduler").key("params").key("decoupled_min_lr").quote(least)
    if "min_lr" not in scheduler.params:
        yield Problem(given, f"{scheduler.type} falls to no minimum", "linear, cosine, inverse-square-root, WSD")
    elif rate is None:
        yield Problem(given, "no rate is decoupled", "optimizer.decoupled_lr and optimizer.decoupled_parameters")
    elif rate < least:
        rule = "a decoupled rate lies above its minimum"
        yield Problem(f"{given} with decoupled_lr: {rate:g}", rule, f"decoupled_min_lr: 0 to {rate:g}")


def _moot(parts: EngineParts, location: Location, plain: Mapping[str, Any]) -> Iterable[Problem]:
    """Return the problems of settings that have no effect.

    plain: the values of keys outside the sections.
    """
    changed = {
        (name, info.name): value
        for name in _SECTIONS
        for info in SETTINGS[type(getattr(parts, name))]
        if (value := getattr(getattr(parts, name), info.name)) != info.default
    }
    sections = [
        ParsedValue(setting, value, location.key(name).key(setting).quote(value))
        for (name, setting), value in changed.items()
    ]
    params = [
        ParsedValue(name, value, location.key(name).quote(value))
        for name, value in changed_params(parts.optimizer, parts.scheduler).items()
    ]
    own = [
        ParsedValue(name, plain[name], location.key(name).quote(plain[name]))
        for name, info in (*_OWN.items(), ("steps_per_print", HONOURED["steps_per_print"]))
        if plain.get(name, info.default) != info.default
    ]
    return moot.of_the_library(parts, [*sections, *params, *own]).problems


def _autocast_problems(autocast: str | None, precision: PrecisionConfig, location: Location) -> Iterator[Problem]:
    """Yield a problem if autocast would compute in another format than parameters that are narrow already.

    Beside parameters in bf16 it lets the operations that torch lists for that compute in fp32.
    """
    if autocast is not None and precision.precision not in ("fp32", autocast if autocast == "bf16" else None):
        given = f"{location}: {autocast} with parameters in {precision.precision}"
        rule = "autocast narrows what a model in fp32 computes, and in bf16 what one in bf16 does"
        yield Problem(given, rule, "fp32 parameters, bf16 for both, or no autocast")


def _undecidable(zero: ZeroConfig, activations: ActivationConfig, location: Location) -> Iterator[Problem]:
    """Yield a problem for each setting that is "auto", which only a run, that holds its model's sizes, can decide."""
    for name in ("partition_activations", "checkpoint_in_cpu"):
        if getattr(activations, name) == "auto":
            rule = f"{name} is decided by the size of checkpoints, which is not known before the model runs"
            yield Problem(f'{location}: activations: {name} "auto"', rule, "true, false")
    for name in _HOMES:
        if getattr(zero, name) == "auto":
            rule = f"{name} is decided by a plan of a step, which is not known before the model runs"
            yield Problem(
                f'{location}: zero: {name} "auto"', rule, "none, cpu, nvme; megazero.plan shows what each takes"
            )


def _checked(config: EngineConfig) -> EngineConfig:
    """Return a configuration made in Python, checked: names, and rules between settings; values are checked already."""
    diagnostics, location = Diagnostics(), Location("config")
    optimizer, scheduler = config.optimizer, config.scheduler
    if optimizer is not None:
        where = location.key("optimizer")
        chosen = choose_optimizer(where, optimizer.type, optimizer.params, diagnostics, defaults={})
        optimizer = replace(chosen, **{name: getattr(optimizer, name) for name in ("lr", *_DECOUPLED, _GROUPS.name)})
    if scheduler is not None:
        where, lr = location.key("scheduler"), None if optimizer is None else optimizer.lr
        chosen_schedule = choose_scheduler(where, scheduler.type, scheduler.params, diagnostics, lr=lr)
        others = ("unit", "tokens_per_sample", "weight_decay", "decoupled_min_lr")
        scheduler = chosen_schedule and replace(chosen_schedule, **{name: getattr(scheduler, name) for name in others})
    parts = EngineParts(
        config.zero,
        config.precision,
        config.activations,
        optimizer,
        scheduler,
        config.autocast,
        config.reports,
        config.curriculum,
    )
    diagnostics.problems.extend(_problems(parts, location))
    diagnostics.problems.extend(_autocast_problems(config.autocast, config.precision, location.key("autocast")))
    if config.origin is Origin.USER:  # a DeepSpeed configuration got its notices when it was read
        diagnostics.problems.extend(
            _moot(parts, location, {name: getattr(config, name) for name in (*_OWN, "steps_per_print")})
        )
    raise_problems(ConfigError, diagnostics.problems)
    notices = (*config.notices, *(notice for notice in diagnostics.notices if notice not in config.notices))
    return replace(config, optimizer=optimizer, scheduler=scheduler, notices=notices)
