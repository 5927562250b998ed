"""Defines `megazero.initialize`, which makes an engine from a module and a configuration."""

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from megazero.activations.assemble import RankParts, recomputation
from megazero.comm.mesh import Mesh
from megazero.errors import ConfigError, Problem, UsageError, raise_problems
from megazero.generators import DefaultGenerators
from megazero.library.adopted.dtensors import unwrap_dtensors
from megazero.library.adopted.join import divided, mesh_and_buffers
from megazero.library.config import (
    BatchSizes,
    EngineConfig,
    automatic_sizes,
    load_engine_config,
    resolve_batch,
    without_optimizer,
    without_training,
)
from megazero.library.data_parallel_engine import LENGTH_ARGUMENT, DataParallelEngine, EngineComponents, takes_length
from megazero.library.module.leaf_modules import choose_leaves
from megazero.library.module.prepare import prepare
from megazero.library.module.units import choose_units
from megazero.library.optimizers import MakeOptimizer, choose, freeze_untrained
from megazero.library.partitioned_init.init import first_value, given_wires
from megazero.library.partitioned_init.wires import check_groups, with_wires
from megazero.library.state.checkpoints import Checkpoints
from megazero.library.state.optimizer import OptimizerState
from megazero.library.step.passes import BackwardPasses
from megazero.library.step.records import StepRecords
from megazero.library.step.stepping import LearningRates, Stepper
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.host import retain_freed_memory
from megazero.memory.ledger_interface import AnyLedger, NullLedger
from megazero.optim.inner import MeasuringOptimizer
from megazero.optim.loss_scaler import LossScaler
from megazero.parallel.launch import Launch
from megazero.parallel.threads import share_cpu_threads
from megazero.report.offload_price import offload_lines
from megazero.rules import moot
from megazero.rules.states import late_updates_need_no_norms
from megazero.rules.trackers import missing_packages
from megazero.tensor_parallel.float32 import use_tf32
from megazero.timers import Timers
from megazero.zero.engine import Engine, EngineSettings
from megazero.zero.plan import DTYPES, ZeroPlan, resolve


def initialize(
    model: nn.Module,
    config: EngineConfig | Mapping[str, Any] | str | Path,
    mesh: Any = None,
    optimizer: Optimizer | MakeOptimizer | None = None,
    *,
    ledger: AnyLedger | None = None,
) -> DataParallelEngine:
    """Return an engine that trains `model` in data parallel with ZeRO; every process calls this with the same model.

    model: moved to this process's device and into the configuration's precision (`module/formats.py`), with
    rank 0's values everywhere; from then on it belongs to the engine.  Parameters that require a gradient now are
    trained, the others are frozen.
    config: megazero's own configuration or DeepSpeed's, as a mapping or a file (`megazero/library/config.py`).
    mesh: the processes that train together: None for all (of torch's default group, or of the launcher's job), a
    megazero Mesh, torch's DeviceMesh, or an object like Megatron-LM's mpu (`adopted/mesh.py`).
    Parameters that are DTensors over its tensor-parallel axis become local tensors (`adopted/dtensors.py`).
    optimizer: a torch optimizer over parameters of the model, or a function that makes one of them; its param groups
    and learning-rate schedulers on it take effect.  The configuration then names none; that of a DeepSpeed
    configuration is left aside with a notice.  None: the configuration's optimizer, over all parameters.  If there is
    neither, the parameters are frozen until the engine is closed: it computes, saves and loads, and trains nothing.
    ledger: counts live memory by category (`megazero/memory/ledger.py`); the program enters it.  None: none is kept.

    Raises ConfigError, TopologyError or UsageError, each with all problems of its kind.
    """
    settings, ledger = read_settings(model, config, optimizer), ledger or NullLedger()
    mesh, buffers = mesh_and_buffers(mesh, settings.limits, ledger)
    check_groups(given_wires(model), mesh.axis("dp"), mesh.device)
    mesh = divided(mesh, settings.zero, buffers, settings.limits)
    if settings.zero.offloads:
        share_cpu_threads(Launch.from_environment())
    engine = assemble(model, settings, mesh, buffers, optimizer, ledger)
    core, accumulation = engine.zero_engine, engine.gradient_accumulation_steps()
    for line in (mesh.notice, *offload_lines(core, accumulation)) if mesh.world.rank == 0 else ():
        if line:
            print(line, file=sys.stderr, flush=True)
    return engine


def read_settings(
    model: nn.Module,
    config: EngineConfig | Mapping[str, Any] | str | Path,
    optimizer: Optimizer | MakeOptimizer | None,
) -> EngineConfig:
    """Return the settings by which `model` is trained, with the wires that it was made with; arguments: `initialize`.

    Raises ConfigError or UsageError.
    """
    if not isinstance(model, nn.Module):
        given = (
            f"model {model.__name__}, a class" if isinstance(model, type) else f"model of type {type(model).__name__}"
        )
        raise UsageError(Problem(given, "a model is a torch.nn.Module that has been made", "MyModel(...)"))
    settings = with_wires(load_engine_config(config), given_wires(model))
    raise_problems(ConfigError, missing_packages(settings.reports, lambda name, value: f"reports.{name}: {value}"))
    return without_training(settings) if optimizer is None else without_optimizer(settings, optimizer)


def assemble(
    model: nn.Module,
    settings: EngineConfig,
    mesh: Mesh,
    buffers: FusedBuffers,
    optimizer: Optimizer | MakeOptimizer | None,
    ledger: AnyLedger,
) -> DataParallelEngine:
    """Return the engine of `model` on a mesh that is divided as the settings ask for; a collective call.

    settings: those of `read_settings`.  buffers: those of the mesh's collectives.  The rest: see `initialize`.
    """
    batch = resolve_batch(settings, mesh.axis("dp").size)
    notices = [*use_tf32(settings.precision, mesh.device, given="precision.tf32")]
    if settings.curriculum.curriculum_learning and not takes_length(model):
        given = f"{type(model).__name__}.forward takes no {LENGTH_ARGUMENT}"
        notices.append(f"curriculum: {given}: the program cuts its rows to engine.{LENGTH_ARGUMENT} tokens")
    _warn(settings, batch, mesh, notices)
    # Gradients that autocast makes in fp16 may overflow, whatever the format of their parameters.
    skips = settings.scales_loss or settings.precision.check_grad_overflow
    plan = replace(resolve(settings.zero, settings.precision), skips_not_finite=skips)
    unwrap_dtensors(model, mesh)
    prepare(
        model,
        mesh,
        plan.parameter.dtype,
        buffer_dtype=None if settings.buffer_dtype is None else DTYPES[settings.buffer_dtype],
        keep_in_fp32=settings.keep_in_fp32,
    )
    raise_problems(UsageError, _problems_of_wide_parameters(model, plan))
    trains = optimizer is not None or settings.optimizer is not None
    frozen = freeze_untrained(model, trains=trains)
    if plan.frozen is not None and mesh.world.rank == 0 and all(p.requires_grad for p in model.parameters()):
        setting = "zero.zero_quantized_nontrainable_weights: true"
        warnings.warn(f"{setting}: moot here, because every parameter is trained", stacklevel=3)
    chosen = choose(optimizer, settings.optimizer, model)
    if isinstance(chosen.inner, MeasuringOptimizer) and optimizer is not None:
        named = f"a given {chosen.kind}"
        problems = late_updates_need_no_norms(chosen.kind, named, settings.zero, lambda name: f"zero.{name}")
        raise_problems(ConfigError, problems)
    rates = LearningRates(
        chosen.groups,
        settings.scheduler,
        samples_per_step=batch.train,
        decoupled=chosen.decoupled,
        factors=chosen.factors,
        decays_itself=chosen.decays_itself,
    )
    if mesh.world.rank == 0:
        for notice in rates.notices():
            warnings.warn(notice, stacklevel=3)
    passes = BackwardPasses(
        batch.accumulation,
        needs_scale=settings.scales_loss,
        has_optimizer=chosen.exists,
        frozen=frozen,
    )
    passes.watch(model)
    units = choose_units(model, choose_leaves(model, settings.zero, plan))
    timers = Timers(mesh.device, level=settings.reports.timing_log_level)
    core_settings = EngineSettings(
        settings.zero,
        chosen.inner,
        first_value,
        checks_finite=settings.precision.check_for_nan_in_loss_and_grad,
        leaves_unused=settings.zero.ignore_unused_parameters and not settings.update_unused_parameters,
        serves_user_code=True,
        timers=timers,
        ledger=ledger,
    )
    try:
        core = Engine(model, units, plan, mesh=mesh, buffers=buffers, settings=core_settings)
    except BaseException:
        passes.close()
        raise
    buffers.resize(core.largest_buffer_bytes)
    retain_freed_memory(mesh.device)
    records = StepRecords(core)
    stepper = Stepper(
        core,
        timers,
        device=mesh.device,
        rates=rates,
        scaler=LossScaler.from_config(settings.precision, autocast=settings.autocast),
        clip_grad=settings.gradient_clipping,
        averages=settings.gradient_allreduce_op == "mean",
        accumulation=batch.accumulation,
        records=records,
    )
    passes.start(core, stepper.gradient_scale)
    state = OptimizerState(chosen, core)
    rank = RankParts(mesh.axis("tp"), mesh.device, DefaultGenerators(mesh.device), ledger, timers)
    parts = EngineComponents(
        settings,
        batch,
        mesh,
        units,
        core,
        passes,
        stepper,
        records,
        optimizer_state=state,
        checkpoints=Checkpoints(model, core, mesh, settings, chosen, state, stepper),
        recomputation=recomputation(settings.activations, rank, number=None),
        timers=timers,
    )
    return DataParallelEngine(model, parts)


def _problems_of_wide_parameters(model: nn.Module, plan: ZeroPlan) -> Iterator[Problem]:
    """Yield the problem of trained parameters that stay in fp32 where their master weights would be bf16."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    wide = [name for name, parameter in trained if parameter.dtype.itemsize > plan.optimizer.itemsize]
    if wide:
        given = f"bf16 master weights, and {wide[0]} in fp32" + (f" with {len(wide) - 1} more" if wide[1:] else "")
        rule = "parameters that stay in fp32 (keep_in_fp32, or the model's own list) have moments in fp32"
        yield Problem(given, rule, "bf16_optimizer_states: false, bf16_master_weights_and_grads: false")


def _warn(config: EngineConfig, batch: BatchSizes, mesh: Mesh, notices: Sequence[str]) -> None:
    """Warn of settings without effect, and report what automatic keys became, once per job.

    notices: what else there is to print.
    """
    sums = config.gradient_allreduce_op == "sum"
    alone = moot.on_one_process(config, sums=sums) if mesh.axis("dp").size == 1 else ()
    if mesh.world.rank == 0:
        for notice in (*config.notices, *alone, *automatic_sizes(config, batch), *notices):
            warnings.warn(notice, stacklevel=4)
