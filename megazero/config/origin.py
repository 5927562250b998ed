"""The kinds of sources of a setting's value, which decide the outcome for a value that has no effect."""

from enum import Enum


class Origin(Enum):
    """A kind of source; `rules/moot.py` describes the outcome of each kind for a setting that has no effect."""

    USER = "a flag, a file or a mapping in megazero's own words"
    FOREIGN = "a DeepSpeed configuration, or a flag that published Megatron scripts carry"
    PROGRAM = "a preset, or the configuration that a run has saved"
    DEFAULT = "a default that a DeepSpeed configuration leaves to DeepSpeed"
