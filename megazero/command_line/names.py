"""Every name of a flag that a run's command line may have, and the names nearest to an unknown one."""

import difflib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from megazero.config.fields import FieldInfo
from megazero.config.run import FIELDS
from megazero.dialects.corpus_files import FILES
from megazero.dialects.megatron import ACCEPTED, FIXED, FOLLOWING, REFUSED, SHORTHANDS

# {flag that names a source of settings, or how its settings count: (form of its value, what it does)}
SOURCES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "config": ("RUN.yaml", "YAML file with the same settings, num_layers: 12; may be given repeatedly"),
        "preset": ("NAME", "settings of a known model (--help presets: their shapes and sizes)"),
        "zero-config": ("NAME", "ZeRO stage and activation settings of a configuration of the ZeRO paper (table 3)"),
        "deepspeed-config": (
            "FILE.json",
            "DeepSpeed configuration, whose values count as flags; what its sections leave out has DeepSpeed's"
            " defaults",
        ),
        "strict": (
            "[true|false]",
            "a setting that has no effect in this configuration is an error also where it comes from a DeepSpeed"
            " configuration or is a flag that published Megatron scripts carry, which earns a notice otherwise"
            " (default: off)",
        ),
    }
)
# {flag after which a run prints something and ends, without training: (form of its value, what it prints)}
QUESTIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "help": (
            "[TOPIC ...]",
            "this text; of a section (zero); presets: their shapes and sizes; or what becomes of a flag (--swiglu) or"
            " of a key of a DeepSpeed configuration (zero_optimization.stage); all: the settings as well that only such"
            " configurations need",
        ),
        "version": ("", "megazero's version"),
        "print-config": (
            "",
            "the resolved configuration as YAML, which --config takes, and where each value comes from; findings go to"
            " the error output",
        ),
        "check": (
            "",
            "check flags, files and layout as a start does, and print what the run would be; no process waits for"
            " another, so that --processes 512 --check takes one machine",
        ),
    }
)
# {name that another training program gives a setting: the setting's flag}
_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        name: flag
        for flag, names in (
            ("lr", "learning-rate max-lr"),
            ("train-iters", "max-steps max-iters steps num-steps num-iterations"),
            ("lr-warmup-iters", "warmup-steps num-warmup-steps"),
            ("num-layers", "n-layer n-layers num-hidden-layers"),
            ("num-attention-heads", "n-head n-heads num-heads"),
            ("hidden-size", "n-embd d-model embed-dim"),
            ("seq-length", "block-size sequence-length seq-len max-seq-len max-seq-length"),
            ("micro-batch-size", "per-device-train-batch-size device-batch-size"),
            ("global-batch-size", "gradient-accumulation-steps total-batch-size train-batch-size"),
            ("tensor-model-parallel-size", "tp tp-size"),
            ("pipeline-model-parallel-size", "pp pp-size"),
            ("clip-grad", "max-grad-norm grad-clip max-norm gradient-clipping"),
            ("lr-decay-style", "lr-scheduler-type lr-scheduler"),
            ("recompute-granularity", "gradient-checkpointing activation-checkpointing"),
            ("save", "output-dir out-dir"),
            ("load", "resume resume-from-checkpoint"),
        )
        for name in names.split()
    }
)
_MOST_SUGGESTED = 3
# Below this similarity two names look alike to difflib only.
_SIMILAR = 0.75


def spellings(info: FieldInfo) -> list[str]:
    """Return every flag of a setting, the canonical one first."""
    flags = [info.flag, *(f"--{alias}" for alias in info.aliases)]
    if info.can_stand_alone and info.default is True:
        flags.append(f"--no-{info.flag.removeprefix('--')}")
    return flags


# {a flag's name, without the two dashes: its setting}
SETTINGS: Mapping[str, FieldInfo] = MappingProxyType(
    {flag.removeprefix("--"): info for info in FIELDS for flag in spellings(info)}
)
# The names that do something here, settings first, without the two dashes.
OWN_NAMES = (*SETTINGS, *SHORTHANDS, *FILES, *SOURCES, "processes", *QUESTIONS)
# Every known name: those that do something here, then all others, the refused ones last.
ALL_NAMES = (*OWN_NAMES, *ACCEPTED, *FIXED, *FOLLOWING, *REFUSED)


def suggest(name: str) -> str:
    """Return the known flags nearest to an unknown name, the nearest first; "" if none is near."""
    names = list(dict.fromkeys(_near(name.lower().replace("_", "-"))))
    return ", ".join(f"--{near}{' (which is refused)' * (near in REFUSED)}" for near in names[:_MOST_SUGGESTED])


def _near(name: str) -> Iterator[str]:
    """Yield the known names near to `name`, without the two dashes; one may come twice."""
    own, known = OWN_NAMES, ALL_NAMES
    if name in known:
        yield name
        return
    if name in _ELSEWHERE:
        yield _ELSEWHERE[name]
        return
    if len(name) > 1:
        yield from (each for each in own if each.startswith(f"{name}-"))
        yield from (each for each in own if each.startswith(name))
    yield from difflib.get_close_matches(name, known, n=_MOST_SUGGESTED, cutoff=_SIMILAR)
    words = {*name.split("-")}
    yield from (each for each in own if words <= {*each.split("-")})
    if len(name) > 1:
        yield from (each for each in known if each.startswith(f"{name}-"))
