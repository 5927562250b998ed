"""Rules between the settings of ZeRO and of precision, which runs and the library's configurations share.

A rule takes the two sections and a `Spell`, which returns the user's name of a setting: "--loss-scale" on a command
line, "fp16.loss_scale" in a DeepSpeed configuration.
"""

from collections.abc import Callable, Iterable, Iterator

from megazero.config.engine_sections import PrecisionConfig, ZeroConfig
from megazero.errors import Problem

Spell = Callable[[str], str]
StateRule = Callable[[ZeroConfig, PrecisionConfig, Spell], Iterable[Problem]]


def loss_scales_are_ordered(zero: ZeroConfig, precision: PrecisionConfig, spell: Spell) -> Iterator[Problem]:
    first, least = precision.initial_loss_scale, precision.min_loss_scale
    if first < least:
        yield Problem(
            f"{spell('initial_loss_scale')} {first:g} {spell('min_loss_scale')} {least:g}",
            "the loss scale starts at or above its minimum",
            f"{spell('initial_loss_scale')} {least:g}, {spell('min_loss_scale')} {first:g}",
        )


def gradients_are_divided_once(zero: ZeroConfig, precision: PrecisionConfig, spell: Spell) -> Iterator[Problem]:
    factor = zero.gradient_predivide_factor
    if zero.prescale_gradients and factor != 1.0:
        yield Problem(
            f"{spell('prescale_gradients')} and {spell('gradient_predivide_factor')} {factor:g}",
            "before the reduction gradients are divided by the data-parallel size or by a factor, not by both",
            f"{spell('gradient_predivide_factor')} 1, or leave out {spell('prescale_gradients')}",
        )


def what_is_offloaded_is_partitioned(zero: ZeroConfig, precision: PrecisionConfig, spell: Spell) -> Iterator[Problem]:
    for setting, least, rule in (
        ("offload_optimizer", 1, "optimizer states have their home in host memory in ZeRO stages 1 to 3, partitioned"),
        ("offload_param", 3, "parameters have their home in host memory in ZeRO stage 3, where they are partitioned"),
    ):
        if getattr(zero, setting) != "none" and zero.zero_stage < least:
            given = f"{spell(setting)} {getattr(zero, setting)} with {spell('zero_stage')} {zero.zero_stage}"
            yield Problem(given, rule, f"{spell('zero_stage')} {least}, or {spell(setting)} none")


STATE_RULES: tuple[StateRule, ...] = (
    what_is_offloaded_is_partitioned,
    loss_scales_are_ordered,
    gradients_are_divided_once,
)
