"""Optimizer and schedule of a DeepSpeed configuration as settings of a run, which has AdamW and its own schedules.

Other optimizers are refused, and schedules that a run's can't express exactly; with a straight warm-up from 0 they can:

    WarmupLR        --lr-decay-style constant, --lr-warmup-iters warmup_num_steps
    WarmupDecayLR   --lr-decay-style linear, the same, --lr-decay-iters total_num_steps, --min-lr 0
    WarmupCosineLR  --lr-decay-style cosine, the same, --min-lr cos_min_ratio x lr

A step then has the schedule's rate at that step.  DeepSpeed calls its schedule after a step, so there the rate comes
one step later; a notice says so.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megazero.config.choices import AUTO, SCHEDULERS, SchedulerChoice, choose_scheduler
from megazero.dialects.deepspeed.sections import Floor, Translation, optimizer_of

_STYLES: Mapping[str, str] = MappingProxyType(
    {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
)
_STEPS: Mapping[str, str] = MappingProxyType(
    {"warmup_num_steps": "lr_warmup_iters", "total_num_steps": "lr_decay_iters"}
)


def adopt_optimizer(adopted: Translation) -> None:
    """Adam's settings, if the optimizer is what a run trains with."""
    file = adopted.file
    before = len(file.diagnostics.problems)
    choice = optimizer_of(file)
    if len(file.diagnostics.problems) > before:
        return
    decay = choice.params.get("weight_decay")
    # Without decay it makes no difference whether it is decoupled.
    if choice.type != "AdamW" and not (choice.type == "Adam" and decay == 0):
        said = file.written("optimizer.type")
        given = said.source if said is not None else str(adopted.file.location("optimizer"))
        if choice.type == "Adam":
            given += f" with adam_w_mode: false and weight_decay: {decay:g}"
        adopted.refuse(given, "a run trains with AdamW, whose weight decay is decoupled", 'type: "AdamW"')
        return
    for name in ("amsgrad", "maximize", "decoupled_weight_decay"):
        if choice.params.get(name):
            given = adopted.file.location(f"optimizer.params.{name}").quote(True)
            adopted.refuse(given, "a run trains with plain AdamW", f"{name}: false")
    beta1, beta2 = choice.params["betas"]
    _adopt_param(adopted, "lr", {"lr": choice.lr})
    _adopt_param(adopted, "betas", {"adam_beta1": beta1, "adam_beta2": beta2})
    _adopt_param(adopted, "eps", {"adam_eps": choice.params["eps"]})
    _adopt_param(adopted, "weight_decay", {"weight_decay": decay})


def _adopt_param(adopted: Translation, name: str, settings: Mapping[str, Any]) -> None:
    """Settings that one parameter of the optimizer stands for."""
    path = f"optimizer.params.{name}"
    params = adopted.file.params.get("optimizer.params", {})
    for setting, value in settings.items():
        if name not in params:
            adopted.default(setting, value, path)
        elif params[name] != AUTO:
            adopted.write(setting, value, adopted.file.location(path).quote(params[name]))


def adopt_scheduler(adopted: Translation) -> None:
    """The schedule as a run's own, if that is exactly the same."""
    file = adopted.file
    before = len(file.diagnostics.problems)
    said = file.written("scheduler.type")
    if said is None:
        return
    params = file.params.get("scheduler.params", {})
    choice = choose_scheduler(
        adopted.file.location("scheduler"),
        said.value,
        params,
        file.diagnostics,
        lr=0.0,
        may_be_auto=("total_num_steps",),
    )
    if choice is None or len(file.diagnostics.problems) > before:
        return
    _refuse_other_warmups(adopted, choice, params)
    if len(file.diagnostics.problems) > before:
        return
    file.diagnostics.notices.append(
        f"{said.source}: taken as --lr-decay-style {_STYLES[choice.type]}; DeepSpeed applies a rate one step later"
    )
    adopted.write("lr_decay_style", _STYLES[choice.type], said.source)
    if choice.type == "WarmupDecayLR":
        adopted.write("min_lr", 0.0, said.source)
    for name, setting in _STEPS.items():
        if name in SCHEDULERS[choice.type]:
            _adopt_written(adopted, name, setting, choice.params.get(name))
    if choice.type == "WarmupCosineLR":
        path = "scheduler.params.cos_min_ratio"
        if params.get("cos_min_ratio") != AUTO:
            adopted.floor = Floor(
                choice.params["cos_min_ratio"], adopted.file.location(path), "cos_min_ratio" in params
            )
    elif params.get("warmup_max_lr") != AUTO:
        _adopt_peak(adopted, choice.params["warmup_max_lr"], written="warmup_max_lr" in params)


def _refuse_other_warmups(adopted: Translation, choice: SchedulerChoice, params: Mapping[str, Any]) -> None:
    """Refuse a warm-up that isn't a straight line from zero, with the flags that make one."""
    style, steps = _STYLES[choice.type], choice.params["warmup_num_steps"]
    flags = f"no scheduler but --lr-decay-style {style} --lr-warmup-iters {steps}"
    kind = choice.params["warmup_type"]
    if kind != "linear" and params.get("warmup_type") != AUTO:
        given = adopted.file.location("scheduler.params.warmup_type").quote(kind)
        given += "" if "warmup_type" in params else " (DeepSpeed's default)"
        adopted.refuse(given, "a run's warm-up is a straight line", f'warmup_type: "linear", or {flags}')
    start = "warmup_min_ratio" if choice.type == "WarmupCosineLR" else "warmup_min_lr"
    if choice.params[start] != 0:
        given = adopted.file.location(f"scheduler.params.{start}").quote(choice.params[start])
        adopted.refuse(given, "a run's warm-up starts at 0", f"{start}: 0, or {flags}")


def _adopt_written(adopted: Translation, name: str, setting: str, value: Any) -> None:
    """A parameter of the schedule: as said, or as a default; an automatic one is the run's to know."""
    path = f"scheduler.params.{name}"
    written = adopted.file.params.get("scheduler.params", {}).get(name)
    if written is None:
        adopted.default(setting, value, path)
    elif written != AUTO:
        adopted.write(setting, value, adopted.file.location(path).quote(value))


def _adopt_peak(adopted: Translation, peak: float, *, written: bool) -> None:
    """The peak of the schedule is the learning rate, whatever the optimizer's is."""
    path = "scheduler.params.warmup_max_lr"
    if not written:
        adopted.default("lr", peak, path)
        return
    source = adopted.file.location(path).quote(peak)
    for item in [item for item in adopted.written if item.name == "lr"]:
        adopted.written.remove(item)
        if item.value != peak:
            adopted.file.diagnostics.notices.append(f"{item.source}: gives way to {source}, the schedule's peak")
    adopted.write("lr", peak, source)
