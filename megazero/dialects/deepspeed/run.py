"""Combines a DeepSpeed configuration, `--deepspeed-config FILE.json`, with the flags of a run.

The settings that the file writes count as flags: a flag with the same value may stand beside one, a flag with another
value is an error.  A key that a section of the file leaves out has DeepSpeed's default, but any source of the setting
takes precedence over that.  "auto", and a section that is absent, leave the settings unchanged.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from megazero.config import derived
from megazero.config.batch import KEYS, GivenSizes, solve
from megazero.config.choices import AUTO
from megazero.config.optimizers import RUN_NAMES, run_settings
from megazero.config.origin import Origin
from megazero.config.run import RunConfig
from megazero.config.validate import INFO
from megazero.config.values import ParsedValue, shown
from megazero.dialects.deepspeed.keys import BATCH_KEYS, HONOURED
from megazero.dialects.deepspeed.optimizer import translate_optimizer, translate_scheduler
from megazero.dialects.deepspeed.reading import ParsedFile
from megazero.dialects.deepspeed.sections import Translation, automatic_notices, resolve, text_for_key, translate
from megazero.errors import Problem

# {size of the batch: the setting that holds it}
_SIZES: Mapping[str, str] = MappingProxyType(
    {part: setting for part, path in KEYS.items() for setting, key in BATCH_KEYS.items() if key == path}
)
_JOB = HONOURED["tensorboard.job_name"].default
_OTHER_WARMUPS = ("lr_warmup_fraction", "lr_warmup_samples", "lr_warmup_tokens")
# {parameter of the optimizer or the schedule: the settings of a run that hold it}
PARAMS_OF_RUN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "optimizer.params.lr": ("lr",),
        "optimizer.params.betas": ("adam_beta1", "adam_beta2"),
        "optimizer.params.eps": ("adam_eps",),
        "optimizer.params.weight_decay": ("weight_decay",),
        "scheduler.params.warmup_max_lr": ("lr",),
        "scheduler.params.warmup_num_steps": ("lr_warmup_iters",),
    }
)


def translate_for_run(file: ParsedFile, *, fp16_requested: bool) -> Translation:
    """Return the settings that a file alone determines; problems are added to the file's diagnostics.

    fp16_requested: True if another source requests fp16, so that an automatic `fp16.enabled` is true.
    """
    translation = translate(file, fp16_requested=fp16_requested)
    for section, add, rate in (
        ("optimizer", translate_optimizer, "lr"),
        ("scheduler", translate_scheduler, "warmup_max_lr"),
    ):
        if section in file.sections:
            before = len(file.diagnostics.problems)
            add(translation)
            # A section with a problem sets no learning rate; where it has one, the run must not report --lr as missing.
            if len(file.diagnostics.problems) > before and file.params.get(f"{section}.params", {}).get(rate) != AUTO:
                translation.unknown.add("lr")
    file.diagnostics.problems.extend(_only_in_the_library(file))
    board = file.written("tensorboard.enabled")
    if board is not None and board.value:
        folder = Path(file.get("tensorboard.output_path", None) or "", file.get("tensorboard.job_name", _JOB))
        translation.write("tensorboard_dir", folder, f"{board.source}, which writes into {folder}")
    return translation


def _only_in_the_library(file: ParsedFile) -> Iterator[Problem]:
    """Yield a problem for each key that a run does not offer."""
    reduction = file.written("gradient_allreduce_op")
    if reduction is not None and reduction.value != "mean":
        rule = "a run's gradients are means over the tokens of the global batch, the same in every layout"
        yield Problem(reduction.source, rule, 'gradient_allreduce_op: "mean"')
    autocast = file.written("torch_autocast.enabled")
    if autocast is not None and autocast.value:
        rule = "the layers of a run choose the format of every product themselves"
        yield Problem(autocast.source, rule, "bf16.enabled: true, or fp16.enabled: true")
    kept = file.written("keep_in_fp32")
    if kept is not None and kept.value:
        yield Problem(kept.source, "a run has all parameters in one format", "leave out keep_in_fp32")


def replaced_loss_scale(translation: Translation, given: ParsedValue) -> str:
    """Return a notice that the file's loss scale replaces the `given` one of the run; "" if it does not.

    Megatron-DeepSpeed's scripts give both, and there the file counts, whose scale of 0 is a dynamic one.  A run that
    took the flag's would lose gradients at a small constant scale.
    """
    named = {item.name: item for item in (*translation.defaults, *translation.written)}
    own = named.get("loss_scale")
    if own is None or own.value == given.value:
        return ""
    first = named.get("initial_loss_scale")
    kind = f"is constant, {own.value:g}" if own.value else "is dynamic"
    start = f", from {first.value:g} on" if first is not None and not own.value else ""
    return f"{given.source}: replaced by {own.source}, as in Megatron-DeepSpeed: the loss scale {kind}{start}"


def complete(translation: Translation, settings: dict[str, ParsedValue], *, data_parallel_size: int) -> list[Problem]:
    """Add to `settings`, the run's, those that depend on all of them: defaults, and sizes that follow from others.

    Returns the problems between file and flags.
    """
    file = translation.file
    for item in translation.defaults:
        if item.name != "lr_warmup_iters" or not any(name in settings for name in _OTHER_WARMUPS):
            settings.setdefault(item.name, ParsedValue(item.name, item.value, item.source, item.origin))
    resolve(translation, settings)
    return [
        *_against_formats(file, settings),
        *_against_batch(translation, settings, data_parallel_size),
        *_against_ratios(translation, settings),
    ]


def notices(file: ParsedFile, config: RunConfig, world_size: int | None) -> Iterator[str]:
    """Yield a line for each section with the values that its automatic keys became in the run.

    world_size: None leaves out the sizes that depend on the number of processes.
    """
    values = {name: (info, getattr(getattr(config, info.section), name)) for name, info in INFO.items()}
    own = run_settings(RUN_NAMES[config.optimizer.optimizer])
    params = {**PARAMS_OF_RUN, **{f"optimizer.params.{name}": settings for name, settings in own.items()}}

    def became(path: str) -> str | None:
        if path == "train_batch_size" and world_size is not None:
            return shown(derived.global_batch_size(config, world_size))
        if path == "gradient_accumulation_steps":
            return None if world_size is None else shown(derived.num_micro_batches(config, world_size))
        if path == "scheduler.params.total_num_steps":
            return None if world_size is None else shown(derived.lr_decay_iters(config, world_size))
        if path == "scheduler.type":
            return "the run's own"
        if path == "optimizer.type":
            return shown("AdamW")
        if path in params:
            found = [values[name][1] for name in params[path]]
            return shown(found[0] if len(found) == 1 else found)
        if path.startswith(("optimizer.params.", "scheduler.params.")):
            return "megazero's own"
        return text_for_key(path, values)

    yield from automatic_notices(file, became)
    if (steps := file.written("steps_per_print")) is not None:
        yield f"{steps.source}: accepted, without effect: a run reports every --log-interval steps"
    profiler = file.written("flops_profiler.enabled")
    if profiler is not None and profiler.value:
        where = "model FLOPs of every step are on the console's lines and in --metrics-file, as TFLOP/s and MFU"
        yield f"{profiler.source}: accepted, without effect: {where}"
    if file.get("fp16.auto_cast", False):
        yield f"{file.location('fp16.auto_cast')}: accepted, without effect: the inputs of a run are whole numbers"
    if (buffers := file.written("data_types.buffer_dtype")) is not None:
        yield f"{buffers.source}: accepted, without effect: the model of a run has no buffers"


def _against_formats(file: ParsedFile, settings: Mapping[str, ParsedValue]) -> Iterator[Problem]:
    """Yield a problem if the file turns off a format that the run's settings turn on."""
    precision = settings.get("precision")
    if precision is None or precision.value not in ("fp16", "bf16"):
        return
    enabled = file.written(f"{precision.value}.enabled")
    if enabled is not None and not enabled.value:
        given = f"{precision.source} and {enabled.source}"
        yield Problem(given, "one turns a number format on, the other off", "one of the two")


def _against_batch(
    translation: Translation, settings: dict[str, ParsedValue], data_parallel_size: int
) -> list[Problem]:
    """Set the batch sizes that follow from the file's and the flags' together; return a problem if they contradict."""
    file = translation.file
    accumulation = file.written(KEYS["accumulation"])
    given = {part: settings[name] for part, name in _SIZES.items() if name in settings}
    if translation.unknown & {*_SIZES.values()} or (accumulation is None and "micro" in given):
        return []
    numbers = {part: item.value for part, item in given.items()}
    names = {**KEYS, **{part: item.source.rpartition(" ")[0].rstrip(":") for part, item in given.items()}}
    if accumulation is not None:
        numbers["accumulation"] = accumulation.value
        names["accumulation"] = str(accumulation.location)
    sizes = solve(GivenSizes(**numbers), data_parallel_size, names)
    if isinstance(sizes, Problem):
        # The run's own rules would find the same contradiction again.
        translation.unknown |= {*_SIZES.values()}
        for name in _SIZES.values():
            settings.pop(name, None)
        return [sizes]
    for part, name in _SIZES.items():
        value = getattr(sizes, part)
        if name not in settings and value is not None:
            source = f"{file.origin}: {KEYS[part]} {value}, which follows on {data_parallel_size} processes"
            settings[name] = ParsedValue(name, value, source, Origin.FOREIGN)
    return []


def _against_ratios(translation: Translation, settings: dict[str, ParsedValue]) -> Iterator[Problem]:
    """Set the settings that are parts of the learning rate; yield a problem for one with another value in the run."""
    lr = settings.get("lr")
    if lr is None:
        return
    for name, ratio in translation.ratios.items():
        value = ratio.value * lr.value
        source = f"{ratio.location.quote(ratio.value)} x {lr.source}"
        given = settings.get(name)
        if given is None:
            settings[name] = ParsedValue(name, value, source, Origin.FOREIGN if ratio.written else Origin.DEFAULT)
        elif ratio.written and not math.isclose(given.value, value, rel_tol=1e-9):
            rule = f"both set {INFO[name].flag}, to different values"
            yield Problem(f"{given.source} and {source}", rule, "one of the two")
