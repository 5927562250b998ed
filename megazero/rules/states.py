"""Rules between the settings of ZeRO and of precision, which runs and the library's configurations share.

A rule takes the two sections and a `Spell`, which returns the user's name of a setting: "--loss-scale" on a command
line, "fp16.loss_scale" in a DeepSpeed configuration.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from megazero.config import derived
from megazero.config.engine_sections import PrecisionConfig, ZeroConfig
from megazero.config.nearest import near_divisors
from megazero.config.optimizers import OPTIMIZERS, in_numbers, num_moments
from megazero.errors import Problem
from megazero.operating_system import ALIGNMENT
from megazero.units import counted

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


def master_weights_have_the_gradients_format(
    zero: ZeroConfig, precision: PrecisionConfig, spell: Spell
) -> Iterator[Problem]:
    if precision.bf16_master_weights and precision.accumulate_allreduce_grads_in_fp32 and precision.precision == "bf16":
        given = f"{spell('bf16_master_weights')} with {spell('accumulate_allreduce_grads_in_fp32')}"
        rule = "the optimizer takes gradients in the format of the weights that it updates"
        yield Problem(given, rule, "one of the two")


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
        ("offload_optimizer", 1, "optimizer states leave the device in ZeRO stages 1 to 3, where they are partitioned"),
        ("offload_param", 3, "parameters leave the device in ZeRO stage 3, where they are partitioned"),
    ):
        if getattr(zero, setting) != "none" and zero.zero_stage < least:
            given = f"{spell(setting)} {getattr(zero, setting)} with {spell('zero_stage')} {zero.zero_stage}"
            yield Problem(given, rule, f"{spell('zero_stage')} {least}, or {spell(setting)} none")


def states_in_files_have_a_folder(zero: ZeroConfig, precision: PrecisionConfig, spell: Spell) -> Iterator[Problem]:
    in_files = [setting for setting in ("offload_optimizer", "offload_param") if getattr(zero, setting) == "nvme"]
    if not in_files:
        return
    if zero.nvme_path is None:
        given = f"{spell(in_files[0])} nvme without {spell('nvme_path')}"
        yield Problem(given, "files of states need a folder", f"{spell('nvme_path')} FOLDER, on a fast local disk")
    elif problem := _problem_of_folder(zero.nvme_path):
        yield Problem(f"{spell('nvme_path')} {zero.nvme_path}", problem, "a folder that exists, or may be made")
    if zero.aio_block_size % ALIGNMENT:
        given = f"{spell('aio_block_size')} {zero.aio_block_size}"
        nearest = max(round(zero.aio_block_size / ALIGNMENT), 1) * ALIGNMENT
        rule = f"files of states are read and written in multiples of {ALIGNMENT} bytes"
        yield Problem(given, rule, f"{spell('aio_block_size')} {nearest}")


def _problem_of_folder(path: Path) -> str:
    """Return the rule that a folder for files breaks; "" for one that is a folder, or may be made."""
    existing = next(part for part in (path.absolute(), *path.absolute().parents) if os.path.lexists(part))
    return "" if existing.is_dir() else f"a folder is made of folders; {existing} is none"


def replicas_are_given_once(zero: ZeroConfig, precision: PrecisionConfig, spell: Spell) -> Iterator[Problem]:
    shards, replicas = zero.mics_shard_size, zero.num_distributed_optimizer_instances
    if shards > 0 and replicas > 1:
        yield Problem(
            f"{spell('mics_shard_size')} {shards} {spell('num_distributed_optimizer_instances')} {replicas}",
            "the size of a shard group and the number of them are the same choice",
            f"{spell('mics_shard_size')} {shards}, or {spell('num_distributed_optimizer_instances')} {replicas}",
        )


def shard_groups_are_equal(zero: ZeroConfig, data_parallel_size: int, spell: Spell) -> Iterator[Problem]:
    """Yield the problem of shard groups that do not divide the data-parallel processes."""
    for setting, value in (
        ("mics_shard_size", zero.mics_shard_size),
        ("num_distributed_optimizer_instances", zero.num_distributed_optimizer_instances),
    ):
        if value > 0 and data_parallel_size % value:
            legal = " or ".join(f"{spell(setting)} {near}" for near in near_divisors(data_parallel_size, value))
            given = f"{spell(setting)} {value} with {counted(data_parallel_size, 'data-parallel process')}"
            yield Problem(given, "shard groups have the same number of data-parallel processes", legal)
            return
    yield from secondary_partitions_are_equal(zero, data_parallel_size, spell)


def quantized_numbers_have_a_form(zero: ZeroConfig, precision: PrecisionConfig, spell: Spell) -> Iterator[Problem]:
    for setting in ("zero_quantized_weights_bits", "zero_quantized_gradients_bits"):
        if getattr(zero, setting) not in (4, 8):
            given = f"{spell(setting)} {getattr(zero, setting)}"
            yield Problem(given, "quantized numbers have 4 bits or 8", f"{spell(setting)} 4, {spell(setting)} 8")
    block = zero.zero_quantized_block_size
    if block & (block - 1):
        near = [1 << (block.bit_length() - 1), 1 << block.bit_length()]
        legal = " or ".join(f"{spell('zero_quantized_block_size')} {size}" for size in near)
        yield Problem(f"{spell('zero_quantized_block_size')} {block}", "a block is a power of two", legal)
    if zero.zero_quantized_gradients and not zero.reduce_scatter:
        given = f"{spell('zero_quantized_gradients')} without {spell('reduce_scatter')}"
        rule = "quantized gradients are exchanged, each process summing up its own part"
        yield Problem(given, rule, f"{spell('reduce_scatter')}")


def encoded_partitions_are_in_memory(zero: ZeroConfig, precision: PrecisionConfig, spell: Spell) -> Iterator[Problem]:
    if zero.zero_quantized_nontrainable_weights and zero.offload_param == "nvme":
        given = f"{spell('zero_quantized_nontrainable_weights')} with {spell('offload_param')} {zero.offload_param}"
        rule = "frozen parameters that are stored as integers are in memory, on the device or the host's"
        yield Problem(given, rule, f"{spell('offload_param')} cpu, or one of them alone")


def secondary_partitions_are_equal(zero: ZeroConfig, data_parallel_size: int, spell: Spell) -> Iterator[Problem]:
    """Yield the problem of secondary partitions that do not divide a shard group."""
    size = zero.zero_hpz_partition_size
    shards = data_parallel_size // derived.num_replicas(zero, data_parallel_size)
    if size > 1 and shards % size:
        legal = " or ".join(f"{spell('zero_hpz_partition_size')} {near}" for near in near_divisors(shards, size))
        given = f"{spell('zero_hpz_partition_size')} {size} with shard groups of {shards}"
        yield Problem(given, "a shard group consists of whole secondary ones", legal)


def late_updates_have_their_gradients(zero: ZeroConfig, precision: PrecisionConfig, spell: Spell) -> Iterator[Problem]:
    if zero.delayed_parameter_update and zero.offload_gradients_nvme:
        given = f"{spell('delayed_parameter_update')} and {spell('offload_gradients_nvme')}"
        rule = "gradients of the next step would come to the files while those of this one are read from there"
        yield Problem(given, rule, f"{spell('delayed_parameter_update')}, or {spell('offload_gradients_nvme')}")


def late_updates_are_asked_for(zero: ZeroConfig, precision: PrecisionConfig, spell: Spell) -> Iterator[Problem]:
    if zero.delayed_parameter_update and zero.offload_optimizer == "auto":
        given = f"{spell('delayed_parameter_update')} with {spell('offload_optimizer')} auto"
        rule = "late updates are another training, which no plan of memory and time may choose"
        yield Problem(
            given, rule, f"{spell('offload_optimizer')} cpu, or leave out {spell('delayed_parameter_update')}"
        )


def late_updates_need_no_norms(optimizer: str, named: str, zero: ZeroConfig, spell: Spell) -> Iterator[Problem]:
    """Yield the problem of an optimizer that cannot update beside the next step.

    optimizer: by its name in the table.  named: as the user names it.
    """
    if zero.delayed_parameter_update and OPTIMIZERS[optimizer].measures:
        given = f"{spell('delayed_parameter_update')} with {named}"
        rule = f"{optimizer} needs figures of whole parameters, which all processes sum up before any is updated"
        yield Problem(given, rule, f"leave out {spell('delayed_parameter_update')}, or another optimizer")


def moments_in_8_bits_have_kernels(
    optimizer: str, named: str, zero: ZeroConfig, precision: PrecisionConfig, spell: Spell
) -> Iterator[Problem]:
    """Yield the problems of an optimizer with moments in 8 bits; nothing is imported.

    optimizer: by its name in the table.  named: as the user names it.
    """
    package = OPTIMIZERS[optimizer].package
    if not package:
        return
    if find_spec(package) is None:
        rule = f"moments in 8 bits are updated by kernels of the package {package}, which is not installed"
        yield Problem(named, rule, f"pip install 'megazero[{package}]', or {in_numbers(optimizer)}")
    if precision.precision == "fp64":
        rule = "the kernels of moments in 8 bits compute in fp32"
        yield Problem(f"{named} with {spell('precision')} fp64", rule, f"{spell('precision')} fp32, bf16 or fp16")
    if zero.offload_optimizer == "nvme":
        rule = "files have blocks of one number format, and moments in 8 bits have a maximum for each block beside"
        given = f"{named} with {spell('offload_optimizer')} nvme"
        yield Problem(given, rule, f"{spell('offload_optimizer')} cpu, or {in_numbers(optimizer)}")


def buffers_hold_an_update(
    optimizer: str, params: Mapping[str, object], zero: ZeroConfig, spell: Spell
) -> Iterator[Problem]:
    """Yield the problem of fewer buffers of states in files than kinds of state of an optimizer.

    One that a program gives is not in the table; its update takes as many buffers as it needs.
    """
    least = 1 + num_moments(optimizer, params) + zero.offload_gradients_nvme  # the weights, and their gradients
    if 0 < zero.offload_buffer_count < least:
        given = f"{spell('offload_buffer_count')} {zero.offload_buffer_count}"
        of_gradients = f" with {spell('offload_gradients_nvme')}" if zero.offload_gradients_nvme else ""
        rule = f"{optimizer} has {counted(least, 'kind')} of state in files{of_gradients}, all in memory for an update"
        legal = f"{spell('offload_buffer_count')} {least} or more, or 0 for as many as are of use"
        yield Problem(given, rule, legal)


def optimizer_fits(
    optimizer: str,
    params: Mapping[str, object],
    named: str,
    zero: ZeroConfig,
    precision: PrecisionConfig,
    spell: Spell,
) -> Iterator[Problem]:
    """Yield the problems of an optimizer with the places and formats of its states.

    optimizer, params: by their names in the table.  named: as the user names it.
    """
    yield from buffers_hold_an_update(optimizer, params, zero, spell)
    yield from late_updates_need_no_norms(optimizer, named, zero, spell)
    yield from moments_in_8_bits_have_kernels(optimizer, named, zero, precision, spell)


STATE_RULES: tuple[StateRule, ...] = (
    what_is_offloaded_is_partitioned,
    states_in_files_have_a_folder,
    late_updates_have_their_gradients,
    late_updates_are_asked_for,
    replicas_are_given_once,
    quantized_numbers_have_a_form,
    encoded_partitions_are_in_memory,
    loss_scales_are_ordered,
    master_weights_have_the_gradients_format,
    gradients_are_divided_once,
)
