"""Where the value of a setting comes from, as far as it matters for what becomes of a value without effect."""

from enum import Enum


class Origin(Enum):
    """The kinds of sources; `rules/moot.py` says what each of them means for a setting that has no effect."""

    USER = "a flag, a file or a mapping in megazero's own words"
    FOREIGN = "a DeepSpeed configuration, or a flag that published Megatron scripts carry"
    PROGRAM = "a preset, or the configuration that a run has saved"
    DEFAULT = "a default that a DeepSpeed configuration leaves to DeepSpeed"
