"""Rules between the settings of recomputation and the rest of a run; `rules.check` tries them.

`count_has_an_arena` is also a rule of the library.  The others are not, since there the user's model chooses the layers
that are recomputed.
"""

from collections.abc import Iterator

from megazero.config.engine_sections import ActivationConfig
from megazero.config.run import RunConfig
from megazero.errors import Problem
from megazero.rules.states import Spell

# The settings of full recomputation, in the order of `--help`.
_SEGMENT_SETTINGS = (
    "recompute_method",
    "recompute_num_layers",
    "partition_activations",
    "checkpoint_in_cpu",
    "contiguous_checkpointing",
    "number_checkpoints",
    "synchronize_each_layer",
    "profile_backward",
)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def segments_are_of_full_recomputation(config: RunConfig, world_size: int) -> Iterator[Problem]:
    granularity = config.activations.recompute_granularity
    values = {_flag(name): getattr(config.activations, name) for name in _SEGMENT_SETTINGS}
    active = {flag: value for flag, value in values.items() if value is not None and value is not False}
    if granularity != "full" and active:
        given = " ".join(flag if value is True else f"{flag} {value}" for flag, value in active.items())
        yield Problem(
            f"{given} with --recompute-granularity {granularity}",
            "only layers that are recomputed whole form segments and keep checkpoints",
            f"--recompute-granularity full, or {', '.join(_without(flag, value) for flag, value in active.items())}",
        )


def _without(flag: str, value: object) -> str:
    """A spelling that switches the setting off.

    "false" overrides a switch that is on in a weaker source, such as a file, where leaving the flag out does not.
    """
    return f"{flag} false" if value is True or value == "auto" else f"without {flag}"


def recomputed_layers_exist(config: RunConfig, world_size: int) -> Iterator[Problem]:
    count, layers = config.activations.recompute_num_layers, config.model.num_layers
    if count is not None and count > layers:
        yield Problem(
            f"--recompute-num-layers {count} --num-layers {layers}",
            "layers that are recomputed are layers of the model: recompute_num_layers is at most num_layers",
            f"--recompute-num-layers {layers}, --num-layers {count}",
        )


def arena_is_asked_for(config: RunConfig, world_size: int) -> Iterator[Problem]:
    yield from count_has_an_arena(config.activations, _flag)


def count_has_an_arena(activations: ActivationConfig, spell: Spell) -> Iterator[Problem]:
    count = activations.number_checkpoints
    if count is not None and not activations.contiguous_checkpointing:
        yield Problem(
            f"{spell('number_checkpoints')} {count} without {spell('contiguous_checkpointing')}",
            "it is the size of the arena in which contiguous_checkpointing keeps checkpoints",
            f"{spell('contiguous_checkpointing')}, or leave out {spell('number_checkpoints')}",
        )


RULES = (segments_are_of_full_recomputation, recomputed_layers_exist, arena_is_asked_for)
