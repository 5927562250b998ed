"""Assembles what a run reports: its writers, statistics, profile, and the lines on its memory."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megazero.activations.assemble import describe
from megazero.checkpoint.runs import RunIdentity
from megazero.checkpoint.state import TrainState
from megazero.comm.mesh import Mesh
from megazero.config import derived
from megazero.config.run import RunConfig
from megazero.config.yaml_file import to_yaml
from megazero.console import Console
from megazero.optim.configured import saved_kinds
from megazero.report.curves_file import CURVES
from megazero.report.device_memory import MemoryReport
from megazero.report.ledger_report import LedgerReport
from megazero.report.memory_history import MemoryHistory, snapshot_of
from megazero.report.memory_report import closing_lines, opening_line
from megazero.report.metrics import Rates, attention_flops, flops_per_token, peak_tflops
from megazero.report.offload_price import offload_lines
from megazero.report.pipeline_report import PipelineReport
from megazero.report.step_profile import StepProfile
from megazero.report.stragglers import StragglerReport
from megazero.report.timing_report import TimingReport
from megazero.report.trackers import flattened, open_trackers
from megazero.report.writers import as_markdown, open_writers
from megazero.rules.optimizer import optimizer_choice
from megazero.train.components import RunComponents
from megazero.train.loop import Reporting
from megazero.train.pipeline_stages import activation_config, num_checkpoints
from megazero.train.start.inputs import RunInputs
from megazero.zero.plan import DTYPES
from megazero.zero.statistics import StatisticsChoice, missing_states


def _mask_bytes(config: RunConfig) -> int:
    """Return the bytes of one micro-batch's attention mask, which all layers share; 0 without a mask."""
    if not config.data.reset_attention_mask:
        return 0
    return config.training.micro_batch_size * config.model.seq_length**2 * DTYPES[config.precision.precision].itemsize


def _has_readers(config: RunConfig) -> bool:
    """Return True if figures of steps go elsewhere than to the console."""
    return config.logging.metrics_file is not None or derived.tracks_scalars(config)


def _statistics(config: RunConfig) -> StatisticsChoice:
    logging = config.logging
    return StatisticsChoice(
        params_norm=logging.log_params_norm,
        num_zeros=logging.log_num_zeros_in_grad,
        optimizer_states=logging.log_optimizer_states_to_tensorboard and _has_readers(config),
        layer_grad_norms=logging.log_layer_grad_norms and _has_readers(config),
    )


def is_profiled(config: RunConfig, rank: int) -> bool:
    return config.logging.profile and rank in map(int, config.logging.profile_ranks)


def begin_memory_history(config: RunConfig, mesh: Mesh) -> MemoryHistory | None:
    """Begin the history of memory of a rank that is profiled; None without --record-memory-history, and on CPUs."""
    logging = config.logging
    if not (logging.record_memory_history and mesh.device.type == "cuda" and is_profiled(config, mesh.rank)):
        return None
    return MemoryHistory(snapshot_of(logging.memory_snapshot_path, mesh.rank, len(logging.profile_ranks)))


def _profile(config: RunConfig, mesh: Mesh, history: MemoryHistory | None) -> StepProfile:
    """Return the profile of this rank: of no step without --profile, and where CUDA's profiler has no GPU."""
    logging, folder = config.logging, derived.profile_folder(config)
    is_seen = logging.use_pytorch_profiler or mesh.device.type == "cuda"
    is_on = is_seen and is_profiled(config, mesh.rank)
    first, last = logging.profile_step_start + 1, logging.profile_step_end
    name = f"rank{mesh.rank:04d}_steps{first}-{last}.pt.trace.json"
    trace = folder / name if folder is not None and logging.use_pytorch_profiler else None
    return StepProfile(mesh.device, first=first if is_on else 0, last=last, trace=trace, history=history)


def missed_profile(config: RunConfig, iteration: int, last: int) -> str:
    """Return the notice of a run from `iteration` to `last` that does not take the first step of its profile, or ""."""
    logging = config.logging
    first = logging.profile_step_start + 1
    if not logging.profile or iteration < first <= last:
        return ""
    return (
        f"--profile: the profile begins with step {first}, and this run takes steps {iteration + 1} to {last}: nothing"
        " is profiled"
    )


def missing_statistics(config: RunConfig) -> str:
    """Return the notice of figures that the optimizer has not got; "" if there is none."""
    choice = optimizer_choice(config.optimizer)
    missing = missing_states(saved_kinds(choice)) if _statistics(config).optimizer_states else ()
    if not missing:
        return ""
    without = " and no ".join(missing)
    return f"--log-optimizer-states-to-tensorboard: {choice.type} keeps no {without}, whose figures are left out"


def make_reporting(
    config: RunConfig,
    console: Console,
    components: RunComponents,
    inputs: RunInputs,
    state: TrainState,
    *,
    history: MemoryHistory | None,
    last: int,
    layout: Sequence[str],
    run: RunIdentity,
    loaded: Path | None = None,
) -> Reporting:
    """Return the writers and reports of a run.

    state: the counters that it continues from.  history: `begin_memory_history`, of before the model was made.
    last: the iteration at which it ends.  layout: its drawing, for TensorBoard.
    loaded: the folder with the checkpoint that it continues from, if it saves into another one.
    """
    device, world_size = components.mesh.device, components.mesh.topology.world_size
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    flops = flops_per_token(config.model, vocab_size=inputs.vocab_size)
    step_flops = flops * derived.global_batch_size(config, world_size) * config.model.seq_length / world_size
    num_micro_batches = derived.num_micro_batches(config, world_size)
    logging = replace(config.logging, tensorboard_dir=derived.tensorboard_dir(config))
    texts = {"configuration": to_yaml(config).splitlines(), "layout": layout}
    sizes = derived.step_sizes(config, world_size)
    end = sizes.samples_after(max(last - state.iteration, 0), consumed=state.consumed_samples)
    writers = open_writers(
        logging,
        console=console,
        train_iters=last,
        train_samples=end if len(sizes.sizes) > 1 else None,
        world_size=world_size,
        resumed_iteration=state.iteration,
        times_parts=config.reports.timing_log_level > 0,
        trackers=lambda: open_trackers(
            config.reports, folder=config.checkpoint.save, settings=flattened(config), report=console.line
        ),
        texts={title: as_markdown(lines) for title, lines in texts.items()},
        curves=None if config.checkpoint.save is None else config.checkpoint.save / CURVES,
        earlier_curves=None if loaded is None else loaded / CURVES,
        run=run.id,
    )
    is_tracked = derived.tracks_scalars(config) and (logging.ledger or logging.log_memory_to_tensorboard)
    ledger = LedgerReport(
        components.engine.settings.ledger,
        components.mesh.meter,
        rank=components.mesh.rank,
        folder=logging.ledger_dir,
        interval=logging.log_interval,
        run=f"{config.model.num_layers} layers of {config.model.hidden_size}, ZeRO stage {config.zero.zero_stage},"
        f" {config.precision.precision}, {components.mesh.topology.describe()}",
        file_bytes=lambda: components.engine.file_bytes,
    )
    pipeline = PipelineReport(
        components.mesh,
        components.plan,
        components.trace,
        folder=logging.pipeline_trace_dir,
        interval=logging.log_interval,
    )
    gathers_ranks = logging.metrics_file is not None or is_tracked
    memory = MemoryReport(device, each_step=gathers_ranks)
    return Reporting(
        console=console,
        writers=writers,
        rates=Rates(
            flops,
            world_size,
            peak_tflops(name, precision=config.precision.precision),
            config.model.seq_length,
            attention_flops(config.model),
        ),
        cuts_rows=derived.row_lengths(config).varies,
        gathers_ranks=gathers_ranks,
        memory=memory,
        ledger=ledger,
        pipeline=pipeline,
        statistics=_statistics(config),
        log_interval=logging.log_interval,
        profile=_profile(config, components.mesh, history),
        part_times=TimingReport(
            components.mesh,
            level=config.reports.timing_log_level,
            option=config.reports.timing_log_option,
            log_interval=logging.log_interval,
            is_on=config.reports.timing_log_level > 0 or (logging.log_timers_to_tensorboard and _has_readers(config)),
        ),
        stragglers=StragglerReport(components.mesh, log_interval=logging.log_interval),
        opening=(
            opening_line(
                describe(activation_config(config), _max_checkpoints(config, components), components.mesh.topology.tp),
                components.activations.logits_chunk_bytes,
                components.buffers,
                mask_bytes=_mask_bytes(config),
            ),
            *(offload_lines(components.engine, num_micro_batches, flops=step_flops) if console.prints else ()),
        ),
        closing=lambda: [
            *pipeline.closing_lines(),
            *memory.closing_lines(),
            *closing_lines(components.engine, components.activations.recomputation),
        ],
    )


def _max_checkpoints(config: RunConfig, components: RunComponents) -> int:
    """Return the largest number of activation checkpoints that this rank has in memory at once."""
    padded = derived.vocab_rows(config, components.model.vocab_size)
    number = derived.num_micro_batches(config, components.mesh.topology.world_size)
    return num_checkpoints(config, components.plan.stage, padded, number)
