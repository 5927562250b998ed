"""Translates the optimizer and the schedule of a DeepSpeed configuration into settings of a run.

An optimizer becomes --optimizer, the settings that are called after its parameters, and --optimizer-params for the
others.  Schedules become those of a run:

    WarmupLR        --lr-decay-style constant, --lr-warmup-iters warmup_num_steps, at least 2, --lr-warmup-type,
                    --lr-warmup-init warmup_min_lr
    WarmupDecayLR   --lr-decay-style linear, the same, --lr-decay-iters total_num_steps, --min-lr warmup_min_lr
    WarmupCosineLR  --lr-decay-style cosine, the same, but --lr-warmup-init warmup_min_ratio x lr, --lr-decay-iters
                    total_num_steps, --min-lr cos_min_ratio x lr

In megazero a step has the schedule's rate at that step.  DeepSpeed calls its schedule after a step, so there each rate
comes one step later; a notice reports this.  Its two others, which count from 1, are the same in a run:

    LRRangeTest     --lr-decay-style LRRangeTest, --lr lr_range_test_min_lr, --lr-decay-params for the others
    OneCycle        --lr-decay-style OneCycle, --lr cycle_max_lr, --min-lr cycle_min_lr, --lr-decay-params
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megazero.config.choices import AUTO, SchedulerChoice, choose_scheduler
from megazero.config.optimizers import DECOUPLED, OPTIMIZERS, RUN_NAMES, run_settings
from megazero.config.schedules import RATE_SETTINGS, SCHEDULES
from megazero.dialects.deepspeed.sections import Ratio, Translation, note_second_beta, optimizer_of

_RUN_NAMES: Mapping[str, str] = MappingProxyType({"Adam": "adam", **{kind: name for name, kind in RUN_NAMES.items()}})
_STYLES: Mapping[str, str] = MappingProxyType(
    {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
)
# {parameter of WarmupCosineLR that is a part of the learning rate: the setting that holds the product}
_RATIOS: Mapping[str, str] = MappingProxyType({"warmup_min_ratio": "lr_warmup_init", "cos_min_ratio": "min_lr"})


def translate_optimizer(translation: Translation) -> None:
    """Add the optimizer and its parameters as settings of a run."""
    file = translation.file
    before = len(file.diagnostics.problems)
    choice = optimizer_of(file)
    if choice is None or len(file.diagnostics.problems) > before:
        return
    # Without weight decay it makes no difference whether that is decoupled, as the fused kernel's is.
    is_adamw = choice.type == "Adam" and not choice.params["weight_decay"]
    kind = "AdamW" if is_adamw else choice.type
    key = file.written("optimizer.type")
    if key is not None:
        translation.write("optimizer", _RUN_NAMES[kind], key.source)
    _translate_optimizer_param(translation, "lr", {"lr": choice.lr})
    own = run_settings(kind)
    for param, settings in own.items():
        value = choice.params[param]
        _translate_optimizer_param(
            translation, param, dict(zip(settings, value if len(settings) > 1 else (value,), strict=True))
        )
    others = {name: value for name, value in choice.params.items() if name in OPTIMIZERS[kind].params.keys() - own}
    words = [
        f"{name}={_word(value)}" for name, value in others.items() if value != OPTIMIZERS[kind].params[name].default
    ]
    if kind == "Adam":
        words.append(f"{DECOUPLED}=false")
    if words:
        translation.write("optimizer_params", tuple(words), f"{file.location('optimizer')}: {' '.join(words)}")


def _word(value: Any) -> str:
    """Return the value of a parameter in the form of --optimizer-params."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(str(item) for item in value) if isinstance(value, tuple) else str(value)


def _translate_optimizer_param(translation: Translation, name: str, settings: Mapping[str, Any]) -> None:
    """Add the settings that one parameter of the optimizer stands for."""
    path = f"optimizer.params.{name}"
    params = translation.file.params.get("optimizer.params", {})
    for setting, value in settings.items():
        if name not in params:
            translation.default(setting, value, path)
        elif params[name] != AUTO:
            translation.write(setting, value, translation.file.location(path).quote(params[name]))


def translate_scheduler(translation: Translation) -> None:
    """Add the schedule as settings of a run, or a problem if a run has no equal schedule."""
    file = translation.file
    before = len(file.diagnostics.problems)
    key = file.written("scheduler.type")
    if key is None:
        return
    params = file.params.get("scheduler.params", {})
    choice = choose_scheduler(
        translation.file.location("scheduler"),
        key.value,
        params,
        file.diagnostics,
        lr=None,
        may_be_auto=("total_num_steps",),
    )
    if choice is None or len(file.diagnostics.problems) > before:
        return
    if choice.type in RATE_SETTINGS:
        _translate_sweep(translation, choice, key.source)
        return
    if choice.type not in _STYLES:  # one of a run's own
        translation.write("lr_decay_style", choice.type, key.source)
        for name, value in choice.params.items():
            _translate_scheduler_param(translation, name, name, value)
        return
    file.diagnostics.notices.append(
        f"{key.source}: taken as --lr-decay-style {_STYLES[choice.type]}; DeepSpeed applies a rate one step later"
    )
    translation.write("lr_decay_style", _STYLES[choice.type], key.source)
    _translate_warmup(translation, choice)
    if choice.type == "WarmupCosineLR":
        for name, setting in _RATIOS.items():
            if params.get(name) != AUTO:
                location = file.location(f"scheduler.params.{name}")
                translation.ratios[setting] = Ratio(choice.params[name], location, name in params)
    elif params.get("warmup_max_lr") != AUTO:
        _translate_peak(translation, "warmup_max_lr", choice.params["warmup_max_lr"])


def _translate_sweep(translation: Translation, choice: SchedulerChoice, source: str) -> None:
    """Add LRRangeTest or OneCycle: its learning rates as settings of their own, the other parameters together."""
    file, table = translation.file, SCHEDULES[choice.type]
    own = RATE_SETTINGS[choice.type]
    note_second_beta(file, choice)
    translation.write("lr_decay_style", choice.type, source)
    for name, setting in own.items():
        if setting == "lr":
            _translate_peak(translation, name, choice.params[name])
        else:
            _translate_scheduler_param(translation, name, setting, choice.params[name])
    others = {name: value for name, value in choice.params.items() if name not in own and value != table[name].default}
    words = tuple(f"{name}={_word(value)}" for name, value in others.items())
    if words:
        translation.write("lr_decay_params", words, f"{file.location('scheduler')}: {' '.join(words)}")


def _translate_warmup(translation: Translation, choice: SchedulerChoice) -> None:
    """Add the length, shape and start of the warm-up, and the end of the decay."""
    values = {**choice.params, "warmup_num_steps": max(2, choice.params["warmup_num_steps"])}
    _translate_scheduler_param(translation, "warmup_num_steps", "lr_warmup_iters", values["warmup_num_steps"])
    _translate_scheduler_param(translation, "warmup_type", "lr_warmup_type", values["warmup_type"])
    if "total_num_steps" in SCHEDULES[choice.type]:
        _translate_scheduler_param(translation, "total_num_steps", "lr_decay_iters", values.get("total_num_steps"))
    if "warmup_min_lr" in values:
        _translate_scheduler_param(translation, "warmup_min_lr", "lr_warmup_init", values["warmup_min_lr"])
    if choice.type == "WarmupDecayLR":
        key = translation.file.written("scheduler.type")
        assert key is not None, "the schedule has been chosen"
        translation.write("min_lr", values["warmup_min_lr"], key.source)


def _translate_scheduler_param(translation: Translation, name: str, setting: str, value: Any) -> None:
    """Add a parameter of the schedule as the file gives it, or its default; an automatic one is left to the run."""
    path = f"scheduler.params.{name}"
    written = translation.file.params.get("scheduler.params", {}).get(name)
    if written is None:
        translation.default(setting, value, path)
    elif written != AUTO:
        translation.write(setting, value, translation.file.location(path).quote(value))


def _translate_peak(translation: Translation, name: str, peak: float) -> None:
    """Make a rate of the schedule, its parameter `name`, the learning rate, in place of the optimizer's."""
    path = f"scheduler.params.{name}"
    if translation.file.params.get("scheduler.params", {}).get(name, AUTO) == AUTO:
        translation.default("lr", peak, path)
        return
    source = translation.file.location(path).quote(peak)
    for item in [item for item in translation.written if item.name == "lr"]:
        translation.written.remove(item)
        if item.value != peak:
            translation.file.diagnostics.notices.append(f"{item.source}: gives way to {source}, the schedule's own")
    translation.write("lr", peak, source)
