"""From the reading of a DeepSpeed configuration to the parts of a configuration of the library.

A key that is absent has DeepSpeed's documented default, a key that says "auto" megazero's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from megazero.config.choices import AUTO, OptimizerChoice, SchedulerChoice, choose_optimizer, choose_scheduler
from megazero.config.engine_sections import ActivationConfig, PrecisionConfig, ZeroConfig
from megazero.config.fields import describe
from megazero.config.values import Findings, Place
from megazero.dialects.deepspeed.keys import ACTIVATION_KEYS, ZERO_KEYS
from megazero.dialects.deepspeed.reading import Reading
from megazero.errors import Problem
from megazero.rules.states import STATE_RULES

# Field of PrecisionConfig -> the key it comes from.
PRECISION_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "loss_scale": "fp16.loss_scale",
        "initial_loss_scale": "fp16.initial_scale_power",
        "min_loss_scale": "fp16.min_loss_scale",
        "loss_scale_window": "fp16.loss_scale_window",
        "hysteresis": "fp16.hysteresis",
        "consecutive_hysteresis": "fp16.consecutive_hysteresis",
    }
)
_FIELDS: Mapping[str, Any] = MappingProxyType(
    {info.name: info.default for cls in (ZeroConfig, PrecisionConfig, ActivationConfig) for info in describe("", cls)}
)
# DeepSpeed's defaults where torch's are others.
_ADAM: Mapping[str, Any] = MappingProxyType({"weight_decay": 0.0})


@dataclass(frozen=True)
class EngineParts:
    """What a configuration of the library consists of, the batch apart."""

    zero: ZeroConfig
    precision: PrecisionConfig
    activations: ActivationConfig
    optimizer: OptimizerChoice
    scheduler: SchedulerChoice | None


def engine_parts(reading: Reading) -> EngineParts:
    """The parts; what is wrong with them goes to the reading's findings."""
    precision = precision_of(reading)
    zero = zero_of(reading)
    activations = activations_of(reading)
    optimizer = optimizer_of(reading)
    scheduler = scheduler_of(reading, optimizer.lr)
    reading.findings.problems.extend(
        replace(problem, given=f"{reading.origin}: {problem.given}")
        for rule in STATE_RULES
        for problem in rule(zero, precision, _spell)
    )
    return EngineParts(zero, precision, activations, optimizer, scheduler)


def _spell(setting: str) -> str:
    if setting == "initial_loss_scale":
        return f"2 to the {PRECISION_KEYS[setting]},"
    return ZERO_KEYS.get(setting) or PRECISION_KEYS.get(setting) or setting


def zero_of(reading: Reading) -> ZeroConfig:
    values = {name: reading.get(path, _FIELDS[name]) for name, path in ZERO_KEYS.items()}
    values["overlap_comm"] = overlaps(values["overlap_comm"], values["zero_stage"])
    values["communication_data_type"] = values["communication_data_type"] or "auto"
    return ZeroConfig(**values)


def overlaps(said: bool | None, stage: int) -> bool:
    """DeepSpeed's rule: without a word, communication overlaps in ZeRO stage 3 only."""
    return stage == 3 if said is None else said


def activations_of(reading: Reading) -> ActivationConfig:
    values = {name: reading.get(path, _FIELDS[name]) for name, path in ACTIVATION_KEYS.items()}
    return ActivationConfig(**values)


def precision_of(reading: Reading) -> PrecisionConfig:
    own = _FIELDS["precision"]
    name = "fp16" if reading.get("fp16.enabled", False) else "bf16" if reading.get("bf16.enabled", False) else own
    values: dict[str, Any] = {"precision": name, "accumulate_allreduce_grads_in_fp32": widens(reading, name)}
    if name == "fp16":
        values |= {field: loss_scale_value(reading, field) for field in PRECISION_KEYS}
    return PrecisionConfig(**values)


def loss_scale_value(reading: Reading, field: str) -> Any:
    """The value of a field about fp16's loss scale: 0 is a dynamic one, a power its first value."""
    path = PRECISION_KEYS[field]
    if reading.said(path) is None and path in reading.values:
        return _FIELDS[field]
    value = reading.get(path, None)
    if field == "loss_scale":
        return value or None
    return 2.0**value if field == "initial_loss_scale" else value


def widens(reading: Reading, precision: str) -> bool:
    """Whether gradients are added up in fp32 although the model computes in a narrower format."""
    said = reading.said("data_types.grad_accum_dtype")
    if said is None or said.value == precision:
        return False
    if said.value == "fp32" and precision in ("bf16", "fp16"):
        return True
    legal = dict.fromkeys((precision, "fp32" if precision in ("bf16", "fp16") else precision))
    rule = f"gradients of a model in {precision} are added up in its format, or in fp32 if that is wider"
    names = ", ".join(f'grad_accum_dtype: "{name}"' for name in legal)
    reading.findings.problems.append(Problem(said.source, rule, names))
    return False


def optimizer_of(reading: Reading) -> OptimizerChoice:
    place, said = reading.place.key("optimizer"), reading.said("optimizer.type")
    params = dict(reading.params.get("optimizer.params", {}))
    if params and "optimizer.type" not in reading.values:
        problem = Problem(f"{place.key('type')} is missing", "an optimizer has a name", 'type: "AdamW"')
        reading.findings.problems.append(problem)
    name = "AdamW" if said is None else said.value
    if name.lower() in ("adam", "adamw"):
        name = _adam(place.key("params"), name, params, reading.findings)
    drop_foreign(place.key("params"), params, reading.findings)
    # What is automatic has torch's default, as in megazero's own form; what is absent has DeepSpeed's.
    defaults = {key: value for key, value in _ADAM.items() if name in ("Adam", "AdamW") and key not in params}
    return choose_optimizer(place, name, params, reading.findings, defaults=defaults)


def _adam(place: Place, name: str, params: dict[str, Any], findings: Findings) -> str:
    """Adam or AdamW as torch means them; takes DeepSpeed's own parameters of Adam out of `params`."""
    decoupled = params.pop("adam_w_mode", AUTO)
    corrected = params.pop("bias_correction", AUTO)
    for key, value in (("adam_w_mode", decoupled), ("bias_correction", corrected)):
        if value != AUTO and not isinstance(value, bool):
            findings.problems.append(Problem(place.key(key).said(value), f"{key} is true or false", "true, false"))
    if corrected is False:
        said = place.key("bias_correction").said(False)
        findings.problems.append(Problem(said, "Adam's moments are always corrected", "bias_correction: true"))
    return "Adam" if name.lower() == "adam" and decoupled is False else "AdamW"


def drop_foreign(place: Place, params: dict[str, Any], findings: Findings) -> None:
    """Refuse the clipping that old configurations put among an optimizer's parameters."""
    value = params.pop("max_grad_norm", 0)
    if value not in (0, None, AUTO):
        rule = "gradients are clipped before the optimizer sees them"
        findings.problems.append(Problem(place.key("max_grad_norm").said(value), rule, f"gradient_clipping: {value}"))


def scheduler_of(reading: Reading, lr: float) -> SchedulerChoice | None:
    said = reading.said("scheduler.type")
    params = reading.params.get("scheduler.params", {})
    place = reading.place.key("scheduler")
    if said is None:
        if params and "scheduler.type" not in reading.values:
            problem = Problem(f"{place.key('type')} is missing", "a schedule has a name", 'type: "WarmupLR"')
            reading.findings.problems.append(problem)
        return None
    return choose_scheduler(place, said.value, params, reading.findings, lr=lr)
