"""`--deepspeed-config FILE.json`: a DeepSpeed configuration as settings of a run.

What the file says counts as if it had been said as flags: the same value beside it is fine, another one is an error.
What a section of the file leaves out has DeepSpeed's default, but gives way to everything that was said anywhere.
"auto", and a section that is absent, leave the settings as they are.
"""

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from megazero.config.batch import KEYS, SaidSizes, solve
from megazero.config.origin import Origin
from megazero.config.validate import Said
from megazero.config.values import is_number
from megazero.dialects.deepspeed.adopted import Adopted
from megazero.dialects.deepspeed.keys import ACTIVATION_KEYS, HONOURED, ZERO_KEYS
from megazero.dialects.deepspeed.reading import Reading
from megazero.dialects.deepspeed.schedule import adopt_optimizer, adopt_scheduler
from megazero.dialects.deepspeed.sections import PRECISION_KEYS, loss_scale_value, overlaps, widens
from megazero.errors import Problem

# Sizes of the batch -> the settings they are.
_SIZES: Mapping[str, str] = MappingProxyType({"train": "global_batch_size", "micro": "micro_batch_size"})
_PLAIN: Mapping[str, str] = MappingProxyType(
    {"gradient_clipping": "clip_grad", **{KEYS[part]: setting for part, setting in _SIZES.items()}}
)


def adopt(reading: Reading, *, wants_fp16: bool) -> Adopted:
    """The settings of a reading, as far as it alone decides them; problems go to its findings.

    wants_fp16: whether fp16 was asked for elsewhere, so that an automatic `fp16.enabled` is true.
    """
    adopted = Adopted(reading)
    _adopt_zero(adopted)
    _adopt_precision(adopted, wants_fp16=wants_fp16)
    plain = {**_PLAIN, **{path: setting for setting, path in ACTIVATION_KEYS.items()}}
    for path, setting in plain.items():
        heard = reading.said(path)
        if heard is not None:
            adopted.say(setting, heard.value, heard.source)
    if "optimizer" in reading.sections:
        adopt_optimizer(adopted)
    if "scheduler" in reading.sections:
        adopt_scheduler(adopted)
    return adopted


def complete(adopted: Adopted, settings: dict[str, Said], *, data_parallel_size: int) -> list[Problem]:
    """Add to the run's `settings` what depends on all of them: defaults, and what follows from file and flags together.

    Returns what file and flags together make wrong.
    """
    reading = adopted.reading
    for item in adopted.defaults:
        if item.name != "lr_warmup_iters" or "lr_warmup_fraction" not in settings:
            settings.setdefault(item.name, item)
    if "zero_optimization" in reading.sections and "zero_optimization.overlap_comm" not in reading.values:
        value = overlaps(None, _whole(settings["zero_stage"].value) or 0)
        source = f"{reading.place.key('zero_optimization.overlap_comm').said(value)} (DeepSpeed's default)"
        settings.setdefault("overlap_comm", Said("overlap_comm", value, source, Origin.DEFAULT))
    return [
        *_against_formats(reading, settings),
        *_against_batch(reading, settings, data_parallel_size),
        *_against_floor(adopted, settings),
    ]


# --- ZeRO, precision and activations ---------------------------------------------------------------------------------


def _adopt_zero(adopted: Adopted) -> None:
    reading = adopted.reading
    for name, path in ZERO_KEYS.items():
        heard = reading.said(path)
        if heard is not None:
            adopted.say(name, heard.value, heard.source)
        elif path not in reading.values and path.partition(".")[0] in reading.sections and name != "overlap_comm":
            adopted.default(name, HONOURED[path].default, path)


def _adopt_precision(adopted: Adopted, *, wants_fp16: bool) -> None:
    reading = adopted.reading
    for name in ("fp16", "bf16"):
        enabled = reading.said(f"{name}.enabled")
        if enabled is not None and enabled.value:
            adopted.say("precision", name, enabled.source)
    wide = reading.said("data_types.grad_accum_dtype")
    if wide is not None and wide.value == "fp32":
        adopted.say("accumulate_allreduce_grads_in_fp32", True, wide.source)
    if not reading.get("fp16.enabled", wants_fp16):
        return
    for setting, path in PRECISION_KEYS.items():
        heard = reading.said(path)
        if heard is not None:
            adopted.say(setting, loss_scale_value(reading, setting), heard.source)
        elif path not in reading.values:
            adopted.default(setting, loss_scale_value(reading, setting), path)


def _against_formats(reading: Reading, settings: Mapping[str, Said]) -> Iterator[Problem]:
    """A format that the file turns off and a flag on; gradients added up in neither the model's format nor fp32."""
    precision = settings.get("precision")
    value = "fp32" if precision is None else str(precision.value)
    enabled = reading.said(f"{value}.enabled")
    if precision is not None and enabled is not None and not enabled.value:
        given = f"{precision.source} and {enabled.source}"
        yield Problem(given, "one turns a number format on, the other off", "one of the two")
    gradients = reading.said("data_types.grad_accum_dtype")
    if gradients is not None and (gradients.value != "fp32" or value == "fp64"):
        widens(reading, value)


# --- batch and learning rate -----------------------------------------------------------------------------------------


def _against_batch(reading: Reading, settings: dict[str, Said], data_parallel_size: int) -> list[Problem]:
    """Set the sizes that follow from the file's and the flags' together; a problem when they contradict each other."""
    accumulation = reading.said(KEYS["accumulation"])
    given = {part: settings[name] for part, name in _SIZES.items() if name in settings}
    numbers = {part: _whole(item.value) for part, item in given.items()}
    if (accumulation is None and "micro" in given) or None in numbers.values():
        return []
    names = {**KEYS, **{part: item.source.rpartition(" ")[0].rstrip(":") for part, item in given.items()}}
    if accumulation is not None:
        numbers["accumulation"] = accumulation.value
        names["accumulation"] = str(accumulation.place)
    sizes = solve(SaidSizes(**numbers), data_parallel_size, names)
    if isinstance(sizes, Problem):
        return [sizes]
    for part, name in _SIZES.items():
        value = getattr(sizes, part)
        if name not in settings and value is not None:
            source = f"{reading.origin}: {KEYS[part]} {value}, which follows on {data_parallel_size} processes"
            settings[name] = Said(name, value, source)
    return []


def _whole(value: Any) -> int | None:
    """A whole number as the command line or a file has it; None when it is none."""
    return int(float(value)) if is_number(value) and float(value).is_integer() else None


def _against_floor(adopted: Adopted, settings: dict[str, Said]) -> Iterator[Problem]:
    """The cosine's end is known once the learning rate is."""
    floor, lr, end = adopted.floor, settings.get("lr"), settings.get("min_lr")
    if floor is None or lr is None or not is_number(lr.value):
        return
    value = floor.ratio * float(lr.value)
    source = f"{floor.place.said(floor.ratio)} x {lr.source}"
    if end is None:
        settings["min_lr"] = Said("min_lr", value, source)
    elif floor.written and is_number(end.value) and not math.isclose(float(end.value), value, rel_tol=1e-9):
        yield Problem(f"{end.source} and {source}", "both set --min-lr, to different values", "one of the two")
