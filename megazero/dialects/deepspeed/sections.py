"""Translates a DeepSpeed configuration into settings of megazero's sections, for the library and for a run.

`translate` returns every setting that a key stands for, with the key as its source: `written` ones are in the file,
`defaults` are DeepSpeed's documented values of keys that are not.  `resolve` decides what depends on several settings.
The library and a run both call the two.  The library builds its sections from the settings right away
(`engine_parts`); a run adds the written ones to its flags first, and gives all other sources precedence over the
defaults (run.py).

A key that is "auto" contributes no setting, so that megazero's own default or the run's flag holds;
`automatic_notices` reports what it became.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from megazero.config.choices import (
    AUTO,
    OptimizerChoice,
    SchedulerChoice,
    changed_params,
    choose_optimizer,
    choose_scheduler,
)
from megazero.config.curriculum import CurriculumConfig, read_curriculum
from megazero.config.engine_sections import SETTINGS, ActivationConfig, PrecisionConfig, ReportConfig, ZeroConfig
from megazero.config.fields import FieldInfo
from megazero.config.origin import Origin
from megazero.config.values import Diagnostics, Location, ParsedValue, RawValue, as_boolean, shown
from megazero.dialects.deepspeed.keys import (
    ACTIVATION_KEYS,
    AUTOCAST,
    BATCH_KEYS,
    CURRICULA,
    CURRICULUM_KEYS,
    EFFICIENCY_SWITCHES,
    ERROR_FEEDBACK_KEYS,
    HONOURED,
    NVME_KEYS,
    OLD_OFFLOAD,
    PIN_KEYS,
    PRECISION_KEYS,
    ZERO_KEYS,
)
from megazero.dialects.deepspeed.reading import ParsedFile
from megazero.errors import Problem
from megazero.rules import moot
from megazero.rules.states import STATE_RULES, optimizer_fits

_Section = TypeVar("_Section", ZeroConfig, PrecisionConfig, ActivationConfig, ReportConfig, CurriculumConfig)

# {setting: the key whose value it takes unchanged}
_SAME: Mapping[str, str] = MappingProxyType(
    {**ZERO_KEYS, **ACTIVATION_KEYS, **BATCH_KEYS, "clip_grad": "gradient_clipping"}
)
_INFO: Mapping[str, FieldInfo] = MappingProxyType(
    {
        info.name: info
        for cls in (ZeroConfig, PrecisionConfig, ActivationConfig, ReportConfig, CurriculumConfig)
        for info in SETTINGS[cls]
    }
)
# {setting of Weights & Biases: the key it comes from}
_WANDB: Mapping[str, str] = MappingProxyType(
    {"wandb_project": "wandb.project", "wandb_entity": "wandb.team", "wandb_group": "wandb.group"}
)
_ACCUMULATION, _ACCUMULATION_KEY = "accumulate_allreduce_grads_in_fp32", "data_types.grad_accum_dtype"
_EVERY_PART = 2  # the level of timers that times what wall_clock_breakdown does
_BF16_STATES = ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states")
# Left out, it is megazero's own: reading the outcome of every step would make a GPU's host wait for it.
_OVERFLOW_KEY = "bf16.check_grad_overflow"
# The loss scale under autocast in fp16 is torch's, whose constants DeepSpeed leaves as they are.
_AUTOCAST_SCALE: Mapping[str, Any] = MappingProxyType(
    {"initial_loss_scale": 65536.0, "loss_scale_window": 2000, "hysteresis": 1}
)
# {optimizer: DeepSpeed's defaults of its parameters that differ from those of the table}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"adam": {"weight_decay": 0.0}, "adamw": {"weight_decay": 0.0}, "lion": {"lr": 1e-3}}
)


_GROWING = ("curriculum_min_seqlen", "curriculum_max_seqlen", "curriculum_steps", "curriculum_seqlen_step")
# {type of a curriculum's schedule: the settings whose keys DeepSpeed requires}
_NEEDED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "": ("curriculum_min_seqlen", "curriculum_max_seqlen", "curriculum_schedule"),
        "fixed_linear": _GROWING,
        "fixed_root": (*_GROWING, "curriculum_root_degree"),
        "fixed_discrete": (*_GROWING[:2], "curriculum_seqlens", "curriculum_last_steps"),
    }
)


@dataclass(frozen=True)
class Ratio:
    """A parameter of the schedule that is a part of the learning rate, which may come from another source.

    written: True if the file gives the ratio, False if it is a default.
    """

    value: float
    location: Location
    written: bool


@dataclass
class Translation:
    """The settings that a file stands for.

    whole: True if a section that the file leaves out has DeepSpeed's defaults too.  written: settings of keys in the
    file.  defaults: settings of keys that are not in it.  unknown: settings whose key has a problem.
    ratios: settings that are parts of the learning rate, by name.
    """

    file: ParsedFile
    whole: bool = False
    written: list[RawValue] = field(default_factory=list)
    defaults: list[RawValue] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    ratios: dict[str, Ratio] = field(default_factory=dict)

    def covers(self, path: str) -> bool:
        """Return True if the key at `path` has DeepSpeed's default when it is absent."""
        return self.whole or path.rpartition(".")[0] in self.file.sections

    def write(self, setting: str, value: Any, source: str) -> None:
        """Add a setting that the file gives."""
        self.written.append(RawValue(setting, value, source, Origin.FOREIGN))

    def default(self, setting: str, value: Any, path: str) -> None:
        """Add a setting that has DeepSpeed's default."""
        source = f"{self.file.location(path).quote(_to_key(setting, value))} (DeepSpeed's default)"
        self.defaults.append(RawValue(setting, value, source, Origin.DEFAULT))


def translate(file: ParsedFile, *, whole: bool = False, fp16_requested: bool = False) -> Translation:
    """Return the settings of all keys but the optimizer's and the schedule's; problems go to the file's diagnostics.

    fp16_requested: True if another source requests fp16, so that an automatic `fp16.enabled` is true.
    """
    translation = Translation(file, whole)
    for setting, path in _SAME.items():
        _translate_key(translation, setting, path)
    for name in ("fp16", "bf16"):
        enabled = file.written(f"{name}.enabled")
        if enabled is not None and enabled.value:
            translation.write("precision", name, enabled.source)
        if f"{name}.enabled" in file.invalid:
            translation.unknown.add("precision")
    if file.get("fp16.enabled", fp16_requested):
        for setting, path in PRECISION_KEYS.items():
            _translate_key(translation, setting, path)
    overflow = file.written(_OVERFLOW_KEY)
    if overflow is not None and file.get("bf16.enabled", False):
        translation.write("check_grad_overflow", overflow.value, overflow.source)
    _translate_masters(translation)
    breakdown = file.written("wall_clock_breakdown")
    if breakdown is not None and breakdown.value:
        translation.write("timing_log_level", _EVERY_PART, breakdown.source)
    _translate_tracker(translation)
    _translate_curriculum(translation)
    wide = file.written(_ACCUMULATION_KEY)
    if wide is not None and wide.value == "fp32":
        translation.write(_ACCUMULATION, True, wide.source)
    _translate_offloading(translation)
    for path, setting in ERROR_FEEDBACK_KEYS.items():
        if (key := file.written(path)) is not None:
            translation.write("zero_error_feedback", True, key.source)
            translation.write(setting, key.value, key.source)
    return translation


def _translate_masters(translation: Translation) -> None:
    """Translate the keys of bf16 master weights and of bf16 moments, which have one format here."""
    file = translation.file
    masters, moments = (file.written(path) for path in _BF16_STATES)
    if not file.get("bf16.enabled", False) or (masters is None and moments is None):
        return
    wanted = {path: file.get(path, False) for path in _BF16_STATES}
    if len(set(wanted.values())) > 1:
        given = next(key.source for key in (masters, moments) if key is not None and key.value)
        names = " and ".join(path.removeprefix("bf16.") for path in wanted)
        rule = "master weights and moments have the same format"
        file.diagnostics.problems.append(Problem(given, rule, f"{names}, both true or both false"))
    elif masters is not None:
        translation.write("bf16_master_weights", masters.value, masters.source)


def _translate_offloading(translation: Translation) -> None:
    """Translate the old keys of offloading, and those by which its host memory is pinned."""
    file = translation.file
    for path, setting in OLD_OFFLOAD.items():
        old, new = file.written(path), file.written(ZERO_KEYS[setting])
        if old is None:
            continue
        value = "cpu" if old.value else "none"
        if new is not None and new.value != value:
            rule = f"both set the home of {setting.removeprefix('offload_')} states, to different values"
            file.diagnostics.problems.append(Problem(f"{old.source} and {new.source}", rule, "one of the two"))
        elif old.value:
            translation.write(setting, value, old.source)
    rule = "host memory is pinned for all that is offloaded, or for none of it"
    _translate_shared(translation, "offload_pin_memory", PIN_KEYS, rule)
    _translate_shared(translation, "nvme_path", NVME_KEYS, "a process makes all its files in one folder")


def _translate_shared(translation: Translation, setting: str, paths: Sequence[str], rule: str) -> None:
    """Translate the keys of one setting in the sections of what is offloaded; rule: that they have one value."""
    file = translation.file
    written = [(path, key) for path in paths if (key := file.written(path)) is not None]
    found = [key for path, key in written if _moves(translation, path)]
    for path, key in written:
        asks = key.value != _INFO[setting].default  # as in rules/moot.py, the default asks for nothing
        if asks and not any(_is_offloaded(file, home) for home in _homes_of(path)):
            what = " or ".join(home.removeprefix("offload_") for home in _homes_of(path))
            file.diagnostics.notices.append(f"{key.source}: moot here, because no {what} states are offloaded")
    if len({key.value for key in found}) > 1:
        given = " and ".join(key.source for key in found)
        file.diagnostics.problems.append(Problem(given, rule, "the same value in both sections"))
    if found:  # also where they differ: no rule is to find the setting missing as well
        value = Path(found[0].value) if _INFO[setting].kind == "path" else found[0].value
        translation.write(setting, value, found[0].source)


def _moves(translation: Translation, path: str) -> bool:
    """Return True if the file offloads what a key is about, which of parameters it does in ZeRO stage 3 alone."""
    file = translation.file
    stage = file.get(ZERO_KEYS["zero_stage"], 3) if translation.whole or ZERO_KEYS["zero_stage"] in file.values else 3
    homes = [home for home in _homes_of(path) if home != "offload_param" or stage >= 3]
    return any(_is_offloaded(file, home) for home in homes)


def _homes_of(path: str) -> tuple[str, ...]:
    """Return the settings of the homes that a key of offloading is about: an old one about both."""
    section = path.rpartition(".")[0].rpartition(".")[2]
    return (section,) if section in OLD_OFFLOAD.values() else tuple(OLD_OFFLOAD.values())


def _is_offloaded(file: ParsedFile, home: str) -> bool:
    """Return True if a key of the file gives a home other than the device."""
    old = [path for path, setting in OLD_OFFLOAD.items() if setting == home]
    devices = [file.written(path) for path in (*old, ZERO_KEYS[home])]
    return any(device is not None and device.value not in (False, "none") for device in devices)


def _translate_tracker(translation: Translation) -> None:
    """Add the settings of Weights & Biases, if the file turns it on."""
    file = translation.file
    enabled = file.written("wandb.enabled")
    if enabled is None or not enabled.value:
        if "wandb" in file.sections:
            file.diagnostics.notices.append(f"{file.location('wandb')}: accepted, without effect: it is turned off")
        return
    for setting, path in _WANDB.items():
        if (key := file.written(path)) is not None:
            translation.write(setting, key.value, key.source)
        elif (default := HONOURED[path].default) is not None:
            translation.write(setting, default, f"{enabled.source}, project {default} (DeepSpeed's default)")


def _translate_curriculum(translation: Translation) -> None:
    """Add the settings of a curriculum by sequence length, if the file turns one on."""
    file = translation.file
    switches = ("curriculum_learning.enabled",), EFFICIENCY_SWITCHES
    on = [
        place
        for place, paths in zip(CURRICULA, switches, strict=True)
        if all(file.get(path, False) for path in paths) and place in file.sections
    ]
    off = [section for section in ("curriculum_learning", "data_efficiency") if section in file.sections]
    for section in off:
        if not any(place.startswith(section) for place in on):
            text = "accepted, without effect: no curriculum by sequence length is turned on in it"
            file.diagnostics.notices.append(f"{file.location(section)}: {text}")
    if len(on) > 1:
        given = " and ".join(str(file.location(place)) for place in on)
        file.diagnostics.problems.append(Problem(given, "rows are cut by one curriculum", "one of the two"))
    for place in on[:1]:
        switch = file.written("curriculum_learning.enabled" if place == CURRICULA[0] else EFFICIENCY_SWITCHES[-1])
        assert switch is not None, "it is on"
        translation.write("curriculum_learning", True, switch.source)
        kind = file.written(f"{place}.schedule_type")
        names = _NEEDED["" if kind is None else kind.value]
        for setting, path in ((setting, f"{place}.{key}") for setting, key in CURRICULUM_KEYS.items()):
            if (key := file.written(path)) is not None:
                translation.write(setting, key.value, key.source)
            elif setting in names and path not in file.invalid:
                legal = f"{path}: {_INFO[setting].legal}"
                file.diagnostics.problems.append(
                    Problem(f"{file.location(path)} is missing", "a curriculum has it", legal)
                )
            if path in file.invalid or (key is None and setting in names):
                translation.unknown.add(setting)


def curriculum_key(file: ParsedFile, setting: str) -> str:
    """Return the key of a curriculum's setting, as the file has it."""
    place = CURRICULA[1] if CURRICULA[1] in file.sections else CURRICULA[0]
    return f"{place}.{CURRICULUM_KEYS.get(setting, 'enabled')}"


def _translate_key(translation: Translation, setting: str, path: str) -> None:
    file, default = translation.file, HONOURED[path].default
    key = file.written(path)
    if key is not None:
        translation.write(setting, _to_setting(setting, key.value), key.source)
    elif path in file.invalid:
        translation.unknown.add(setting)
    elif path not in file.values and default is not None and translation.covers(path):
        translation.default(setting, _to_setting(setting, default), path)


def _to_setting(setting: str, value: Any) -> Any:
    """Return the setting's value for a key's: a loss scale of 0 becomes None (dynamic), a power its first value."""
    if setting == "loss_scale":
        return value or None
    return 2.0**value if setting == "initial_loss_scale" else value


def _to_key(setting: str, value: Any) -> Any:
    """Return the key's value for a setting's, the inverse of `_to_setting`."""
    if setting == "loss_scale":
        return value or 0
    if setting == "initial_loss_scale":
        power = math.log2(value)
        return int(power) if power.is_integer() else power
    return value


def resolve(translation: Translation, settings: dict[str, ParsedValue]) -> None:
    """Change `settings`, those of all sources, where the meaning of a key depends on other settings."""
    _resolve_overlap(translation, settings)
    _resolve_home(translation.file, settings)
    if "precision" not in translation.unknown:
        _resolve_accumulation(translation.file, settings)


def _resolve_overlap(translation: Translation, settings: dict[str, ParsedValue]) -> None:
    """Add DeepSpeed's default of overlap_comm, which is true in ZeRO stage 3 only."""
    path = ZERO_KEYS["overlap_comm"]
    is_absent = path not in translation.file.values and path not in translation.file.invalid
    if is_absent and translation.covers(path) and "zero_stage" in settings:
        value = settings["zero_stage"].value == 3
        source = f"{translation.file.location(path).quote(value)} (DeepSpeed's default)"
        settings.setdefault("overlap_comm", ParsedValue("overlap_comm", value, source, Origin.DEFAULT))


def _resolve_home(file: ParsedFile, settings: dict[str, ParsedValue]) -> None:
    """Remove offload_param below stage 3, where DeepSpeed documents that it is not valid and leaves it unread."""
    home, stage = settings.get("offload_param"), settings.get("zero_stage")
    if home is None or home.value == "none" or home.origin is not Origin.FOREIGN:
        return
    if stage is not None and stage.value < 3:
        del settings["offload_param"]
        text = "moot here, because parameters are partitioned, and offloaded, in ZeRO stage 3 alone"
        file.diagnostics.notices.append(f"{home.source}: {text}")


def _resolve_accumulation(file: ParsedFile, settings: dict[str, ParsedValue]) -> None:
    """Check the format of accumulated gradients, which must be the model's, or fp32 where that is wider."""
    key = file.written(_ACCUMULATION_KEY)
    precision = settings["precision"].value if "precision" in settings else _INFO["precision"].default
    is_narrow = precision in ("bf16", "fp16")
    if key is None or (key.value == "fp32" and is_narrow):
        return
    if _ACCUMULATION in settings and settings[_ACCUMULATION].source == key.source:
        del settings[_ACCUMULATION]
    if key.value != precision:
        rule = f"gradients of a model in {precision} are added up in its format, or in fp32 if that is wider"
        legal = (precision, "fp32") if is_narrow else (precision,)
        names = ", ".join(f'grad_accum_dtype: "{name}"' for name in legal)
        file.diagnostics.problems.append(Problem(key.source, rule, names))


# --- "auto" ----------------------------------------------------------------------------------------------------------


def automatic_notices(file: ParsedFile, became: Callable[[str], str | None]) -> Iterator[str]:
    """Yield one line for each section with "auto" keys, with the value that each of them became.

    became: a function that returns the text for a key's canonical path; None leaves the key out.
    """
    keys = [(path, key.location) for path, key in file.values.items() if file.is_automatic(path)]
    for path, params in file.params.items():
        keys += [(f"{path}.{n}", file.location(path).key(str(n))) for n, value in params.items() if value == AUTO]
    texts = [(location, became(path)) for path, location in keys] + [(location, "left out") for location in file.off]
    lines: dict[str, list[str]] = {}
    for location, text in texts:
        section, _, name = location.path.rpartition(".")
        if text is not None:
            lines.setdefault(section, []).append(f"{name}: {text}")
    for section, words in lines.items():
        yield f'{file.location(section)}: "auto" became {", ".join(words)}'


def text_for_key(path: str, values: Mapping[str, tuple[FieldInfo, Any]]) -> str | None:
    """Return the text of an automatic key of the shared sections, from the settings' values; None for any other key."""
    for name in ("fp16", "bf16"):
        if path == f"{name}.enabled":
            return shown(values["precision"][1] == name)
    if path == _OVERFLOW_KEY:
        return shown(values["check_grad_overflow"][1])
    if path == _ACCUMULATION_KEY:
        precision = values["precision"][1]
        return shown("fp32" if values[_ACCUMULATION][1] else precision)
    setting = next((name for name, key in {**_SAME, **PRECISION_KEYS}.items() if key == path), "")
    if setting not in values:
        return None
    info, value = values[setting]
    if value is None and setting != "loss_scale":
        return info.when_unset
    return shown(_to_key(setting, value))


# --- the library -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineParts:
    """The sections of a configuration of the library, without the batch's sizes."""

    zero: ZeroConfig
    precision: PrecisionConfig
    activations: ActivationConfig
    optimizer: OptimizerChoice | None
    scheduler: SchedulerChoice | None
    autocast: Literal["bf16", "fp16"] | None = None
    reports: ReportConfig = field(default_factory=ReportConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)


def engine_parts(file: ParsedFile) -> EngineParts:
    """Return the library's sections; problems and notices are added to the file's diagnostics."""
    translation = translate(file, whole=True)
    raw = (*translation.defaults, *translation.written)
    settings = {item.name: ParsedValue(item.name, item.value, item.source, item.origin) for item in raw}
    resolve(translation, settings)
    autocast = file.get("torch_autocast.dtype", AUTOCAST[0]) if file.get("torch_autocast.enabled", False) else None
    if autocast == "fp16":
        for name, value in _AUTOCAST_SCALE.items():
            settings.setdefault(name, ParsedValue(name, value, f"{name} of torch.amp.GradScaler", Origin.DEFAULT))
    zero = _build(ZeroConfig, settings)
    precision = _build(PrecisionConfig, settings)
    activations = _build(ActivationConfig, settings)
    optimizer = optimizer_of(file)
    scheduler = scheduler_of(file, None if optimizer is None else optimizer.lr)
    found = [problem for rule in STATE_RULES for problem in rule(zero, precision, _spell)]
    if optimizer is not None:
        kind = optimizer.type
        found += optimizer_fits(kind, optimizer.params, f"optimizer.type {kind}", zero, precision, _spell)
    file.diagnostics.problems.extend(
        replace(problem, given=f"{file.origin}: {problem.given}{_old_keys(file, problem.given)}") for problem in found
    )
    cast = file.written("fp16.auto_cast")
    if cast is not None and cast.value:
        rule = "refused: the model's inputs keep their number format"
        file.diagnostics.problems.append(Problem(cast.source, rule, "cast them in the program"))
    curriculum = _build(CurriculumConfig, settings)
    if curriculum.curriculum_learning and not translation.unknown & {*CURRICULUM_KEYS}:
        grown = read_curriculum(curriculum, None, lambda setting: curriculum_key(file, setting))
        if isinstance(grown, Problem):
            file.diagnostics.problems.append(replace(grown, given=f"{file.origin}: {grown.given}"))
    file.diagnostics.problems.extend(_only_in_a_run(file))
    reports = _build(ReportConfig, settings)
    parts = EngineParts(zero, precision, activations, optimizer, scheduler, autocast, reports, curriculum)
    given = [*settings.values(), *_given_params(file, parts)]
    if (steps := file.written("steps_per_print")) is not None:
        given.append(ParsedValue("steps_per_print", steps.value, steps.source, Origin.FOREIGN))
    file.diagnostics.notices.extend(moot.of_the_library(parts, given).notices)
    file.diagnostics.notices.extend(automatic_notices(file, lambda path: _became(path, parts)))
    return parts


def _only_in_a_run(file: ParsedFile) -> Iterator[Problem]:
    """Yield a problem for each section that only a run offers."""
    reasons = {
        "tensorboard": ("reports go to the program's own writers", "pretrain_gpt.py has --tensorboard-dir"),
        "flops_profiler": ("a model of one's own has no known FLOPs; run it under torch.profiler or nsys", ""),
    }
    for section, (reason, legal) in reasons.items():
        enabled = file.written(f"{section}.enabled")
        if enabled is not None and enabled.value:
            legal = ", ".join(filter(None, (f"leave out {section}", legal)))
            yield Problem(enabled.source, f"refused: {reason}", legal)


def _given_params(file: ParsedFile, parts: EngineParts) -> Iterator[ParsedValue]:
    """Yield the parameters of optimizer and schedule to which the file gives values other than their defaults."""
    for name, value in changed_params(parts.optimizer, parts.scheduler).items():
        path = "optimizer.params.lr" if name == "optimizer.lr" else name
        section, _, key = path.rpartition(".")
        if file.params.get(section, {}).get(key, AUTO) != AUTO:
            yield ParsedValue(name, value, file.location(path).quote(value), Origin.FOREIGN)


def _build(cls: type[_Section], settings: Mapping[str, ParsedValue]) -> _Section:
    return cls(**{info.name: settings[info.name].value for info in SETTINGS[cls] if info.name in settings})


def _spell(setting: str) -> str:
    if setting == "initial_loss_scale":
        return f"2 to the {PRECISION_KEYS[setting]},"
    return ZERO_KEYS.get(setting) or PRECISION_KEYS.get(setting) or setting


def _old_keys(file: ParsedFile, given: str) -> str:
    """Return the old keys from which the values of quoted settings come, as an addition to what a problem quotes."""
    keys = ((_spell(setting), file.written(path)) for path, setting in OLD_OFFLOAD.items())
    return "".join(f"; {name} comes from {key.source}" for name, key in keys if key and key.value and name in given)


def _became(path: str, parts: EngineParts) -> str | None:
    """Return the text of an automatic key in the library; None for the batch's sizes, which depend on the processes."""
    section, _, name = path.rpartition(".")
    if section == "optimizer.params" and parts.optimizer is not None:
        params = {"lr": parts.optimizer.lr, **parts.optimizer.params}
        return shown(params[name]) if name in params else "megazero's own"
    if section == "scheduler.params" and parts.scheduler is not None:
        if name == "warmup_max_lr" and parts.optimizer is None:
            return "the learning rate of the optimizer that is given"
        return shown(parts.scheduler.params[name]) if name in parts.scheduler.params else "megazero's own"
    if path == "optimizer.type":
        return "no optimizer" if parts.optimizer is None else shown(parts.optimizer.type)
    if path == "scheduler.type":
        return "no schedule"
    if path == "gradient_clipping":
        return "0.0"
    if path in ("gradient_allreduce_op", "torch_autocast.enabled", "torch_autocast.dtype"):
        return shown(HONOURED[path].default)
    sections = (parts.zero, parts.precision, parts.activations, parts.reports)
    values = {info.name: (info, getattr(item, info.name)) for item in sections for info in SETTINGS[type(item)]}
    return text_for_key(path, values)


def optimizer_of(file: ParsedFile) -> OptimizerChoice | None:
    """Return the optimizer that the file names, if any, AdamW if the name is automatic.

    Problems are added to the file's diagnostics.
    """
    location, key = file.location("optimizer"), file.written("optimizer.type")
    params = dict(file.params.get("optimizer.params", {}))
    if "optimizer.type" not in (*file.values, *file.invalid):
        if params:
            problem = Problem(f"{location.key('type')} is missing", "an optimizer has a name", 'type: "AdamW"')
            file.diagnostics.problems.append(problem)
        return None
    name = "AdamW" if key is None else key.value
    if name.lower() in ("adam", "adamw"):
        name = _adam(location.key("params"), name, params, file.diagnostics)
    if name.lower() == "lamb":
        _refuse_third_moment(location.key("params"), params, file.diagnostics)
    _refuse_clipping(location.key("params"), params, file.diagnostics)
    # An automatic parameter has torch's default, as in megazero's own form; an absent one has DeepSpeed's.
    defaults = {key: value for key, value in _DEFAULTS.get(name.lower(), {}).items() if key not in params}
    return choose_optimizer(location, name, params, file.diagnostics, defaults=defaults)


def _adam(location: Location, name: str, params: dict[str, Any], diagnostics: Diagnostics) -> str:
    """Return torch's name, Adam or AdamW, for DeepSpeed's Adam; remove DeepSpeed's own parameters from `params`."""
    given = {key: params.pop(key) for key in ("adam_w_mode", "bias_correction") if key in params}
    switches = {key: as_boolean(value) for key, value in given.items()}
    for key, value in given.items():
        if value != AUTO and switches[key] is None:
            problem = Problem(location.key(key).quote(value), f"{key} is true or false", "true, false")
            diagnostics.problems.append(problem)
    if switches.get("bias_correction") is False:
        quoted = location.key("bias_correction").quote(given["bias_correction"])
        diagnostics.problems.append(Problem(quoted, "Adam's moments are always corrected", "bias_correction: true"))
    return "Adam" if name.lower() == "adam" and switches.get("adam_w_mode") is False else "AdamW"


def _refuse_third_moment(location: Location, params: dict[str, Any], diagnostics: Diagnostics) -> None:
    """Refuse amsgrad, a parameter of DeepSpeed's LAMB that may only be false there too."""
    value = params.pop("amsgrad", False)
    if value != AUTO and as_boolean(value) is not False:
        quoted = location.key("amsgrad").quote(value)
        diagnostics.problems.append(Problem(quoted, "LAMB has two moments", "amsgrad: false"))


def _refuse_clipping(location: Location, params: dict[str, Any], diagnostics: Diagnostics) -> None:
    """Refuse max_grad_norm, by which old configurations set clipping among an optimizer's parameters."""
    value = params.pop("max_grad_norm", 0)
    if value not in (0, None, AUTO):
        rule = "gradients are clipped before the optimizer sees them"
        diagnostics.problems.append(
            Problem(location.key("max_grad_norm").quote(value), rule, f"gradient_clipping: {value}")
        )


def scheduler_of(file: ParsedFile, lr: float | None) -> SchedulerChoice | None:
    """Return the schedule that the file names, if any; problems are added to the file's diagnostics.

    lr: the optimizer's learning rate; None if the file names no optimizer.
    """
    key = file.written("scheduler.type")
    params = file.params.get("scheduler.params", {})
    location = file.location("scheduler")
    if key is None:
        if params and "scheduler.type" not in (*file.values, *file.invalid):
            problem = Problem(f"{location.key('type')} is missing", "a schedule has a name", 'type: "WarmupLR"')
            file.diagnostics.problems.append(problem)
        return None
    choice = choose_scheduler(location, key.value, params, file.diagnostics, lr=lr, in_library=True)
    note_second_beta(file, choice)
    return choice


def note_second_beta(file: ParsedFile, choice: SchedulerChoice | None) -> None:
    """Add a notice if the schedule cycles a momentum, an Adam's first beta: DeepSpeed changes the second one too."""
    if choice is not None and choice.params.get("cycle_momentum"):
        text = "cycles the first beta only; DeepSpeed also sets the second one, to 0.99, whatever the optimizer has"
        file.diagnostics.notices.append(f"{file.location('scheduler.type').quote(choice.type)}: {text}")
