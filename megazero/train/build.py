"""Build a run from a configuration: one function makes each component, and is given only the components it needs.

`check.check` comes first; `check_checkpoint` and `check_param_groups` need no process group either.
`assemble` makes the mesh, the model, the engine, the data and the writers, and restores or initialises.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import megazero
from megazero.activations.assemble import RankParts, activation_plan
from megazero.checkpoint.background import BackgroundSave
from megazero.checkpoint.engine_state import check_optimizer, has_stepped, restore_engine
from megazero.checkpoint.fallback import Taken, refusal, report, restore_first_sound, set_damaged_aside
from megazero.checkpoint.folder_lock import FolderLock, lock_folder
from megazero.checkpoint.folders import list_steps, remove_hidden
from megazero.checkpoint.journal import Journal
from megazero.checkpoint.reader import Checkpoint
from megazero.checkpoint.retention import Retention
from megazero.checkpoint.runs import PROGRESS_KEY
from megazero.checkpoint.space import steps_to_save
from megazero.checkpoint.state import TrainState
from megazero.comm.local import LocalCommunicator
from megazero.comm.mesh import Mesh
from megazero.comm.metered import Meter
from megazero.comm.startup import make_mesh, second_control
from megazero.config import derived
from megazero.config.param_groups import unmatched
from megazero.config.run import RunConfig
from megazero.config.yaml_file import to_yaml
from megazero.console import Console
from megazero.data.loader import BatchLayout, BatchLoader
from megazero.data.tokenizers import load_tokenizer
from megazero.errors import ConfigError, Problem, raise_problems
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.host import retain_freed_memory, return_freed_memory
from megazero.memory.ledger_interface import AnyLedger, NullLedger
from megazero.model.compiled import compile_blocks, is_compiled, parameters_of_parts
from megazero.model.gpt import GPT, INPUT_AND_OUTPUT
from megazero.model.graphs import record_blocks
from megazero.model.initial_values import initial_value
from megazero.optim.configured import make_optimizer, patterns_of, saved_kinds
from megazero.optim.loss_scaler import LossScaler
from megazero.optim.schedules import LearningRate, reconcile
from megazero.parallel.drawing import draw_layout
from megazero.parallel.launch import Launch, job_name
from megazero.parallel.nodes import Nodes
from megazero.parallel.param_spec import mark_alone, named_specs
from megazero.pipeline.trace import NO_TRACE, Trace
from megazero.rules.adapters import ADAPTERS_HAVE_A_BASE, RANDOM_BASE
from megazero.rules.optimizer import optimizer_choice
from megazero.rules.run import compiled_under_ledger
from megazero.tensor_parallel.adapters import is_adapters
from megazero.tensor_parallel.compiler import compiled as compiled_function
from megazero.tensor_parallel.deferred import DeferredGradients
from megazero.tensor_parallel.float8 import Float8Products, float8_products
from megazero.tensor_parallel.float8_scales import PROGRESS_KEY as SCALES_KEY
from megazero.tensor_parallel.float8_scales import DelayedRecipe, DelayedScales
from megazero.tensor_parallel.float8_weights import QuantisedWeights, give_own_products, linear_layers
from megazero.tensor_parallel.layers import TensorParallel
from megazero.tensor_parallel.onednn import fastest_products
from megazero.tensor_parallel.random import RandomRegions
from megazero.timers import Timers
from megazero.train.attention_kernel import choose_for_run
from megazero.train.components import RunComponents
from megazero.train.context import StepContext
from megazero.train.decisions import WORLD_SIZE_KEY
from megazero.train.evaluate import EvaluationSet
from megazero.train.loop import Run, Timetable
from megazero.train.pipeline_stages import (
    activation_config,
    describe_stages,
    num_checkpoints,
    stage_chunks,
    stage_plan,
)
from megazero.train.reporting import begin_memory_history, make_reporting, missed_profile, missing_statistics
from megazero.train.samples import PROMPT_TOKENS, SampledText
from megazero.train.saving import (
    PLACE_KEY,
    Saver,
    changed_settings,
    check_compatible,
    check_model,
    check_progress,
    check_shapes,
    choose_run,
    find_checkpoint,
    is_from_root,
    run_going_on,
)
from megazero.train.start.check import topology
from megazero.train.start.inputs import Placed, RunInputs, find_tokenizer
from megazero.units import format_bytes
from megazero.zero.engine import Engine, EngineSettings
from megazero.zero.plan import DTYPES, Placement, resolve, wires


def check_checkpoint(config: RunConfig, inputs: RunInputs, world_size: int) -> Taken | None:
    """Check that --load can work, against the whole model on the meta device, and return what it takes; None: nothing.

    No tensor is read.

    Raises ConfigError for the settings that differ, or CheckpointError for the tensors that do.
    """
    found = find_checkpoint(config.checkpoint)
    if found is None and config.model.lora_rank and not config.checkpoint.lora_random_base:
        given = f"--lora-rank {config.model.lora_rank} with --load {config.checkpoint.load}, which has no checkpoint"
        raise ConfigError(Problem(given, ADAPTERS_HAVE_A_BASE, f"--load BASE --finetune, or {RANDOM_BASE}"))
    if found is not None:
        _check_fits(found.checkpoint, config, vocab_size=inputs.vocab_size)
        if not config.checkpoint.finetune:
            schedule = LearningRate.from_config(config.optimizer, derived.run_length(config, world_size))
            _reconciled(found.checkpoint, schedule, config, world_size)
    return found


def _begun_adapters(checkpoint: Checkpoint, config: RunConfig) -> frozenset[str]:
    """Return the names of the adapters' parameters that begin anew beside a checkpoint's weights, if it has none."""
    begins = config.model.lora_rank > 0 and config.checkpoint.finetune
    if not begins or any(map(is_adapters, checkpoint.parameters)):
        return frozenset()
    names = (name for name, _ in _meta_model(config, vocab_size=config.model.vocab_size or 2).named_parameters())
    return frozenset(filter(is_adapters, names))


def check_param_groups(config: RunConfig, vocab_size: int) -> None:
    """Raise ConfigError for patterns of --param-groups that no parameter of the whole model is left for."""
    groups = optimizer_choice(config.optimizer).param_groups
    if groups:
        model = _meta_model(config, vocab_size=vocab_size)
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        raise_problems(ConfigError, unmatched(groups, names, "--param-groups"))


def _reconciled(checkpoint: Checkpoint, schedule: LearningRate, config: RunConfig, world_size: int) -> LearningRate:
    """Return the schedule of a run that goes on from a checkpoint; errors: see `reconcile`."""
    saved, sizes = checkpoint.progress.get("learning_rate"), derived.step_sizes(config, world_size)
    iteration, samples = (checkpoint.progress.get(name) for name in ("iteration", "consumed_samples"))
    is_constant = len(sizes.sizes) == 1 and isinstance(iteration, int) and samples == iteration * sizes.largest
    return reconcile(
        schedule,
        saved if isinstance(saved, dict) else {},
        config.optimizer,
        step_size=sizes.largest if is_constant else None,
    )


def _check_fits(checkpoint: Checkpoint, config: RunConfig, *, vocab_size: int) -> None:
    goes_on = not config.checkpoint.finetune
    check_model(checkpoint, replace(config.model, vocab_size=vocab_size), goes_on=goes_on)
    model = _meta_model(config, vocab_size=vocab_size)
    kinds: tuple[str, ...] = ("weight",)
    if not _takes_weights_only(config):
        choice = optimizer_choice(config.optimizer)
        given = f"--optimizer of kind {choice.type}"
        check_optimizer(checkpoint, choice.type, given=given, otherwise="--no-load-optim")
        kinds += saved_kinds(choice) if has_stepped(checkpoint) else ()
    check_shapes(checkpoint, model, kinds=kinds, without=_begun_adapters(checkpoint, config))
    if not config.checkpoint.finetune:
        check_compatible(checkpoint, seed=config.training.seed, seq_length=config.model.seq_length)


def build_components(
    config: RunConfig,
    mesh: Mesh,
    buffers: FusedBuffers,
    *,
    vocab_size: int,
    ledger: AnyLedger | None = None,
    compiles: bool | None = None,
) -> RunComponents:
    """Build the model with its initial values and its engine, and resize `buffers` to what the engine needs.

    A collective call of all ranks of the mesh.  ledger: one that is kept watches single operations, so that nothing is
    compiled unless --compile on demands it, which raises ConfigError.  compiles: stands for this decision in a dry run,
    whose ledger can follow what it has in place of compiled code.
    """
    ledger = ledger or NullLedger()
    if compiles is None:
        compiles = is_compiled(
            config.training.compile,
            mesh.device,
            keeps_ledger=ledger.is_kept,
            cuts_rows=config.curriculum.curriculum_learning,
        )
        if compiles and ledger.is_kept:
            raise ConfigError(compiled_under_ledger("a kept ledger", config.training.compile))
    attention = choose_for_run(config, mesh.device, mesh.world)
    padded, stage = derived.vocab_rows(config, vocab_size), mesh.coordinate("pp")
    timers = Timers(mesh.device, level=config.reports.timing_log_level)
    random = RandomRegions(config.training.seed, mesh.coordinate("tp"), mesh.device)
    rank = RankParts(mesh.axis("tp"), mesh.device, random, ledger, timers)
    in_flight = derived.num_micro_batches(config, mesh.topology.world_size)
    max_checkpoints = num_checkpoints(config, stage, padded, in_flight)
    plan = stage_plan(config, stage)
    tp = tensor_parallel(config, mesh, random, splits_backward=plan.schedule == "zero-bubble", compiles=compiles)
    activations = activation_plan(activation_config(config), max_checkpoints, rank)
    model = GPT(
        config.model,
        vocab_size=vocab_size,
        tp=tp,
        padded_vocab_size=padded,
        activations=activations,
        chunks=stage_chunks(config, stage, padded),
        group_layers=config.training.compile_num_layers if tp.within_compiled else 1,
    )
    if compiles and not tp.within_compiled and config.precision.accumulate_allreduce_grads_in_fp32:
        mark_alone(parameters_of_parts(model))  # torch compiles nothing that reads a bf16 tensor with an fp32 `.grad`
    engine = _build_engine(config, model, mesh, buffers, ledger, timers, compiles=compiles)
    searches = config.training.compile == "max"
    compiled = compile_blocks(model, as_a_whole=tp.within_compiled, searches=searches) if compiles else None
    if compiled is not None and config.training.enable_cuda_graph:
        record_blocks(model)
        compiled += ", recorded as CUDA graphs"
    if config.precision.fp8_format is not None:
        give_own_products(linear_layers(model.layers.values()))
    weights = _quantised_weights(config, model, engine)
    tokens = config.training.micro_batch_size * config.model.seq_length
    activation_bytes = tokens * config.model.hidden_size * tp.dtype.itemsize if tp.border.splits_sequence else 0
    buffers.resize(max(engine.largest_buffer_bytes, activation_bytes))  # gloo's reduce-scatter borrows its input's size
    return_freed_memory(mesh.device)
    retain_freed_memory(mesh.device)
    trace = NO_TRACE if config.logging.pipeline_trace_dir is None else Trace(mesh.device)
    return RunComponents(
        mesh=mesh,
        model=model,
        engine=engine,
        random=random,
        activations=activations,
        timers=timers,
        buffers=buffers,
        plan=plan,
        deferred=tp.deferred,
        trace=trace,
        attention=attention,
        compiled=compiled,
        weights=weights,
        scales=_delayed_scales(config, model, mesh, ledger),
    )


def _blocks_have_no_effects(config: RunConfig, splits_backward: bool) -> bool:
    """Return True if a block's forward and backward only compute: nothing is sent, deferred, or recomputed."""
    is_recomputed = config.activations.recompute_granularity == "selective"
    return config.parallel.tensor_model_parallel_size == 1 and not (splits_backward or is_recomputed)


def tensor_parallel(
    config: RunConfig, mesh: Mesh, random: RandomRegions, *, splits_backward: bool, compiles: bool
) -> TensorParallel:
    """Return the tensor-parallel settings that all layers of the model share."""
    dtype = DTYPES[config.precision.precision]
    products, fp8 = fastest_products(mesh.device, dtype), config.precision.fp8_format
    return TensorParallel(
        mesh.axis("tp"),
        random,
        dtype,
        mesh.device,
        hollow=True,
        splits_sequence=config.parallel.sequence_parallel,
        deferred=DeferredGradients() if splits_backward else None,
        products=products if fp8 is None else float8_products(fp8, products),
        head_products=products,
        within_compiled=compiles and _blocks_have_no_effects(config, splits_backward),
    )


def _quantised_weights(config: RunConfig, model: GPT, engine: Engine) -> QuantisedWeights | None:
    """Return the 8-bit form of the blocks' weights that is made once a step, None where every product makes it."""
    precision = config.precision
    keeps_values = engine.plan.parameter.placement is Placement.REPLICATED
    if precision.fp8_format is None or not precision.fp8_cache_weights:
        return None
    if precision.fp8_recipe == "delayed" and not keeps_values:
        return None
    return QuantisedWeights(
        {module: linear_layers(blocks) for module, blocks in model.consumers()},
        count_changes=lambda: engine.num_weight_changes,
        keeps_values=keeps_values,
        ledger=engine.settings.ledger,
    )


def _delayed_scales(config: RunConfig, model: GPT, mesh: Mesh, ledger: AnyLedger) -> DelayedScales | None:
    """Return the scales by which this rank's layers round, of all that the model has; None without delayed scaling."""
    precision = config.precision
    if precision.fp8_format is None or precision.fp8_recipe != "delayed":
        return None
    layers = {name: linear_layers([block]) for name, block in model.layers.items()}
    return DelayedScales(
        {
            int(name) * len(held) + index: layer.products
            for name, held in layers.items()
            for index, layer in enumerate(held)
            if isinstance(layer.products, Float8Products)
        },
        DelayedRecipe(
            precision.fp8_margin,
            precision.fp8_amax_history_len,
            precision.fp8_amax_compute_algo,
            first_gradient_scale=float(_num_positions(config, mesh)),
        ),
        num_layers=config.model.num_layers * len(next(iter(layers.values()))),
        world=mesh.world,
        device=mesh.device,
        ledger=ledger,
    )


def _num_positions(config: RunConfig, mesh: Mesh) -> int:
    """Return the number of token positions of a global batch."""
    return derived.global_batch_size(config, mesh.topology.world_size) * config.model.seq_length


def _build_engine(
    config: RunConfig,
    model: GPT,
    mesh: Mesh,
    buffers: FusedBuffers,
    ledger: AnyLedger,
    timers: Timers,
    *,
    compiles: bool,
) -> Engine:
    choice = optimizer_choice(config.optimizer)
    names = _all_parameters(config, model) if mesh.topology.pp > 1 else ()
    check_param_groups(config, model.vocab_size)
    settings = EngineSettings(
        config.zero,
        make_optimizer(
            choice,
            model,
            frozenset() if config.optimizer.decoupled_lr is None else INPUT_AND_OUTPUT,
            compile=partial(compiled_function, has_one_shape=False) if compiles else None,
        ),
        lambda spec, parameter: initial_value(spec, config.training.seed, like=parameter),
        ledger,
        parameter_names=names,
        checks_finite=config.precision.check_for_nan_in_loss_and_grad,
        timers=timers,
    )
    plan = resolve(config.zero, config.precision)
    return Engine(model, model.units(), plan, mesh=mesh, buffers=buffers, settings=settings)


def _all_parameters(config: RunConfig, part: GPT) -> tuple[str, ...]:
    """Return the parameter names of the whole model; each pipeline stage has some of them."""
    return tuple(name for name, _ in _meta_model(config, vocab_size=part.vocab_size).named_parameters())


def _meta_model(config: RunConfig, *, vocab_size: int) -> GPT:
    """Build the whole model on the meta device, where parameters take no memory."""
    meta = torch.device("meta")
    tp = TensorParallel(LocalCommunicator(), RandomRegions(0, 0, torch.device("cpu")), torch.float32, meta)
    return GPT(config.model, vocab_size=vocab_size, tp=tp, padded_vocab_size=vocab_size)


def step_context(config: RunConfig, components: RunComponents) -> StepContext:
    """Return the context of every training and evaluation step of the run."""
    choice, optimizer = optimizer_choice(config.optimizer), components.engine.settings.optimizer
    patterns = patterns_of(choice, components.model, optimizer)
    return StepContext(
        engine=components.engine,
        model=components.model,
        mesh=components.mesh,
        dropout=components.random,
        timers=components.timers,
        clip_grad=config.optimizer.clip_grad,
        checks_overflow=components.engine.plan.may_overflow,
        ledger=components.engine.settings.ledger,
        plan=components.plan,
        deferred=components.deferred,
        trace=components.trace,
        attention=components.attention.kernel,
        decayed=[
            group
            for number, group in enumerate(optimizer.options)
            if group.get("weight_decay") and (number not in patterns or patterns[number].weight_decay is None)
        ],
        decoupled=_decoupled_groups(config, components),
        scaled=[
            (optimizer.options[number], pattern.lr / choice.lr)
            for number, pattern in patterns.items()
            if pattern.lr is not None
        ],
        scales=components.scales,
    )


def _decoupled_groups(config: RunConfig, components: RunComponents) -> list[dict[str, Any]]:
    """Return the optimizer's param groups with --decoupled-lr; none on pipeline stages without such parameters."""
    if config.optimizer.decoupled_lr is None:
        return []
    optimizer = components.engine.settings.optimizer
    named = [(spec, parameter) for spec, parameter in named_specs(components.model) if spec.name in INPUT_AND_OUTPUT]
    groups = {optimizer.group_of(spec, parameter) for spec, parameter in named}
    return [optimizer.options[group] for group in groups]


def open_journal(config: RunConfig, launch: Launch) -> Journal:
    """Return the journal of a run that saves, which rank 0 writes; other ranks' and other runs' write nothing."""
    return Journal(config.checkpoint.save if launch.rank == 0 else None, Console(launch.rank).line)


def assemble(
    config: RunConfig,
    launch: Launch,
    device: torch.device,
    inputs: RunInputs,
    ledger: AnyLedger | None = None,
    journal: Journal | None = None,
    meter: Meter | None = None,
) -> Run:
    """Build a run, restored from a checkpoint or freshly initialised.

    ledger: records the memory it allocates.  meter: counts its traffic; by default one that nothing else reads.
    """
    config = replace(config, model=replace(config.model, vocab_size=inputs.vocab_size))
    console = Console(launch.rank)
    journal = journal or open_journal(config, launch)
    buffers = FusedBuffers(0, device, ledger=ledger)
    layout = topology(config, launch.world_size, launch.nodes)
    mesh = make_mesh(
        layout,
        launch.rank,
        device,
        buffers,
        timeout_minutes=derived.collective_limit_minutes(config.limits),
        join_minutes=derived.join_limit_minutes(config.limits),
        meter=meter,
        wires=wires(config.zero),
        nodes=launch.nodes,
    )
    lock = _lock(config, mesh, console)
    try:
        return _assemble_on(mesh, buffers, lock, config, launch, inputs, ledger, journal)
    except BaseException:
        if lock is not None:
            lock.release()
        raise


def _lock(config: RunConfig, mesh: Mesh, console: Console) -> FolderLock | None:
    """Take the lock of --save, before anything is written there; None without --save, and on other ranks than 0."""
    root = config.checkpoint.save
    if root is None:
        return None
    lock = lock_folder(root, control=mesh.control)
    if lock is not None:
        if lock.broken:
            console.line(lock.broken)
        for path in remove_hidden(root):
            console.line(f"{path} was left by a process that may still run; remove it if that has ended")
    return lock


def _assemble_on(
    mesh: Mesh,
    buffers: FusedBuffers,
    lock: FolderLock | None,
    config: RunConfig,
    launch: Launch,
    inputs: RunInputs,
    ledger: AnyLedger | None,
    journal: Journal,
) -> Run:
    """Build a run on its mesh; lock: that of --save, on rank 0."""
    console = Console(launch.rank)
    padded = derived.vocab_rows(config, inputs.vocab_size)
    drawing = draw_layout(mesh.topology, launch.nodes)
    if launch.world_size > 1 and not launch.ranks_per_node:
        console.line("the launcher doesn't set which rank is on which node (LOCAL_WORLD_SIZE): all are taken for one")
    stages = describe_stages(config, padded)
    for line in (*(drawing if launch.world_size > 1 else ()), *stages):
        console.line(line)
    if mesh.notice:
        console.line(mesh.notice)
    for prefix in inputs.masked:
        console.line(f"{prefix}: the loss is of answers only, by its mask (--answer-loss-mask off: of every token)")
    config = replace(config, activations=activation_config(config))
    history = begin_memory_history(config, mesh)
    components = build_components(config, mesh, buffers, vocab_size=inputs.vocab_size, ledger=ledger)
    if components.attention.line:
        console.line(components.attention.line)
    if components.weights is not None:
        kept = f"{format_bytes(components.weights.kept_bytes)} of values" if components.weights.kept_bytes else "scales"
        console.line(f"8-bit form of weights: {kept} on this rank, made once a step")
    if components.compiled is not None:
        console.line(f"torch.compile: {components.compiled}, at the first step")
    elif config.training.compile_num_layers > 1:
        console.line(f"--compile-num-layers {config.training.compile_num_layers}: moot here, since nothing is compiled")
    if config.logging.profile and mesh.device.type == "cpu" and not config.logging.use_pytorch_profiler:
        console.line("--profile: moot here, because on CPUs only torch's profiler sees a step (--use-pytorch-profiler)")
    if config.logging.record_memory_history and mesh.device.type == "cpu":
        console.line(
            "--record-memory-history: moot here, because only a GPU's allocator records one; on CPUs the ledger"
            " (--ledger --ledger-dir DIR) lists what lives in memory"
        )
    if notice := missing_statistics(config):
        console.line(notice)
    for notice in inputs.notices:
        console.line(notice)
    train_iters = derived.train_iters(config, launch.world_size)
    sizes = derived.step_sizes(config, launch.world_size)
    if len(sizes.sizes) > 1:
        console.line(f"global batch size: {sizes}")
    rows = derived.row_lengths(config)
    if rows.varies:
        console.line(f"curriculum: rows of {rows} tokens")
    scaler = LossScaler.from_config(config.precision)
    schedule = LearningRate.from_config(config.optimizer, derived.run_length(config, launch.world_size))
    resumed = _resume(config, components, schedule, scaler, console)
    resumed.learning_rate.check_momentum(train_iters)
    last = _last_iteration(config, resumed.state, launch.world_size)
    placed = inputs.placed(resumed.place, resumed.state.consumed_samples)
    for line in placed.notices:
        console.line(line)
    for line in resumed.learning_rate.notices(components.engine.settings.optimizer.options):
        console.line(line)
    if notice := missed_profile(config, resumed.state.iteration, last):
        console.line(notice)
    layout = batch_layout(config, components.mesh, inputs.eod)
    saver = _saver(config, components, resumed, placed, lock, console)
    if saver is not None:
        _announce_start(journal, config, saver, resumed, launch.nodes, console)
    run = run_going_on(config.checkpoint, resumed.checkpoint) if saver is None else saver.run
    return Run(
        context=step_context(config, components),
        state=resumed.state,
        scaler=scaler,
        learning_rate=resumed.learning_rate,
        loader=BatchLoader(
            placed.samples,
            layout,
            start_sample=resumed.state.consumed_samples,
            start_step=resumed.state.iteration,
            prefetch=config.data.num_workers,
            sizes=sizes,
            lengths=rows if rows.varies else None,
            unread=derived.untrained_steps(config),
        ),
        held_out=_held_out(config, inputs, layout),
        timetable=_timetable(config, last),
        saver=saver,
        reporting=make_reporting(
            config,
            console,
            components,
            inputs,
            resumed.state,
            history=history,
            last=last,
            layout=[*drawing, *stages],
            run=run,
            loaded=_other_folder(config, resumed.checkpoint),
        ),
        journal=journal,
        sampled=_sampled(config, inputs, prints=console.prints),
        launcher=launch.launcher,
    )


def _other_folder(config: RunConfig, checkpoint: Checkpoint | None) -> Path | None:
    """Return the folder of the run's checkpoints so far, if it saves into another one from now on; else None."""
    save = config.checkpoint.save
    moves = save is not None and not is_from_root(checkpoint, save)
    return checkpoint.folder.parent if checkpoint is not None and moves else None


def _sampled(config: RunConfig, inputs: RunInputs, *, prints: bool) -> SampledText | None:
    """Return the text to generate at evaluations, which begins as the held-out text does; None where none is asked."""
    spec = find_tokenizer(config.data) if config.logging.eval_sample_tokens else None
    if not (config.logging.eval_sample_tokens and config.training.eval_iters and spec and inputs.valid):
        return None
    return SampledText(
        prompt=inputs.valid.sample(0)[: min(PROMPT_TOKENS, config.model.seq_length)].tolist(),
        num_tokens=config.logging.eval_sample_tokens,
        shape=(config.training.micro_batch_size, config.model.seq_length),
        vocab_size=inputs.vocab_size,
        seed=config.training.seed,
        decode=load_tokenizer(spec).decode if prints else None,
    )


def batch_layout(config: RunConfig, mesh: Mesh, eod: int | None) -> BatchLayout:
    """Return the split of a step's samples over data-parallel ranks and micro-batches."""
    return BatchLayout(
        global_batch_size=derived.global_batch_size(config, mesh.topology.world_size),
        micro_batch_size=config.training.micro_batch_size,
        data_rank=mesh.coordinate("dp"),
        data_size=mesh.topology.dp,
        masked_token=eod if config.data.eod_mask_loss else None,
        document_end=eod,
        resets_positions=config.data.reset_position_ids,
        resets_attention=config.data.reset_attention_mask,
        pins=mesh.device.type == "cuda",
    )


def _takes_weights_only(config: RunConfig) -> bool:
    return config.checkpoint.finetune or config.checkpoint.no_load_optim


@dataclass(frozen=True)
class _Resumed:
    """The state that a start takes from a checkpoint.

    fallback: the lines on newer ones that are damaged, and passed over.  place: that in the corpora; None without one.
    """

    state: TrainState
    learning_rate: LearningRate
    checkpoint: Checkpoint | None = None
    fallback: tuple[str, ...] = ()
    place: Mapping[str, Any] | None = None


def _restore_newest(
    config: RunConfig, components: RunComponents, console: Console
) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Restore the engine from the newest sound checkpoint of --load, and print what of its state begins anew.

    Returns that one, None if there is none at all, and the lines on newer ones that are damaged.
    """
    load, save, mesh = config.checkpoint.load, config.checkpoint.save, components.mesh
    if load is None:
        return None, ()
    notices: list[str] = []

    def restore(found: Checkpoint) -> None:
        without, with_optimizer = _begun_adapters(found, config), not _takes_weights_only(config)
        notices[:] = restore_engine(
            found, components.engine, mesh.control, with_optimizer=with_optimizer, without=without
        )

    taken = restore_first_sound(
        load,
        check=lambda found: check_progress(found, config.checkpoint),
        restore=restore,
        fits=lambda found: _check_fits(found, config, vocab_size=components.model.vocab_size),
        control=mesh.control,
    )
    for line in notices:
        console.line(line)
    if taken is None or taken.is_newest:
        return taken and taken.checkpoint, ()
    if config.checkpoint.strict_load:
        raise refusal(taken, load, is_read=True)
    is_own = save is not None and save.resolve() == load.resolve()
    return taken.checkpoint, (*report(taken), *(set_damaged_aside(taken) if is_own and mesh.rank == 0 else ()))


def _resume(
    config: RunConfig, components: RunComponents, schedule: LearningRate, scaler: LossScaler, console: Console
) -> _Resumed:
    """Restore the engine and the counters from a checkpoint, or start the counters where there is none."""
    checkpoint, fallback = _restore_newest(config, components, console)
    for line in fallback:
        console.line(line)
    weights_only = _takes_weights_only(config)
    if checkpoint is None:
        return _Resumed(TrainState(scaler.start()), schedule)
    if config.checkpoint.finetune:
        return _Resumed(TrainState(scaler.start()), schedule, checkpoint, fallback)
    state = TrainState.from_json(checkpoint.progress, step=checkpoint.step)
    if components.scales is not None and SCALES_KEY in checkpoint.progress:
        components.scales.restore(checkpoint.progress[SCALES_KEY])
    elif components.scales is not None:
        console.line(f"{checkpoint.folder} has no scales of 8-bit numbers: delayed scaling begins without a history")
    if not (scaler.dynamic and checkpoint.progress.get("loss_scale_is_dynamic")):
        state.loss_scale = scaler.start()  # a constant scale is no state of a dynamic one
    if not weights_only:
        components.engine.optimizer_step.fill_(state.optimizer_steps)
    world_size = components.mesh.topology.world_size
    reconciled = _reconciled(checkpoint, schedule, config, world_size)
    place = checkpoint.progress.get(PLACE_KEY)
    return _Resumed(state, reconciled, checkpoint, fallback, place if isinstance(place, dict) else None)


def _held_out(config: RunConfig, inputs: RunInputs, layout: BatchLayout) -> dict[str, EvaluationSet]:
    """Return the evaluation sets, by the names under which they are reported."""
    num_batches = config.training.eval_iters
    return {
        f"{each.split} {each.group}".strip(): EvaluationSet(
            each.samples, layout, num_batches, each.bytes_per_token, split=each.split, group=each.group
        )
        for each in inputs.held_out.values()
        if num_batches > 0
    }


def _last_iteration(config: RunConfig, state: TrainState, world_size: int) -> int:
    """Return the iteration at which the run ends, from the progress that it continues from."""
    progress = {
        "iteration": state.iteration,
        "consumed_samples": state.consumed_samples,
        "consumed_tokens": state.consumed_tokens,
    }
    return derived.last_iteration(config, world_size, **progress)


def _timetable(config: RunConfig, train_iters: int) -> Timetable:
    minutes = config.training.exit_duration_in_mins
    return Timetable(
        train_iters=train_iters,
        eval_interval=config.training.eval_interval,
        eval_at_start=config.training.eval_at_start,
        save_interval=config.checkpoint.save_interval,
        exit_interval=config.training.exit_interval,
        exit_after_seconds=None if minutes is None else 60 * minutes,
        kill_switch=config.training.kill_switch_path,
        triggers=config.training.trigger_path,
    )


def _saver(
    config: RunConfig,
    components: RunComponents,
    resumed: _Resumed,
    placed: Placed,
    lock: FolderLock | None,
    console: Console,
) -> Saver | None:
    root = config.checkpoint.save
    if root is None:
        return None
    goes_on_in_root = is_from_root(resumed.checkpoint, root) and resumed.state.iteration > 0
    config_yaml = to_yaml(config)
    extra = {
        "learning_rate": resumed.learning_rate.to_json(),
        "optimizer": optimizer_choice(config.optimizer).type,
        "loss_scale_is_dynamic": LossScaler.from_config(config.precision).dynamic,
        "seed": config.training.seed,
        "seq_length": config.model.seq_length,
        WORLD_SIZE_KEY: components.mesh.topology.world_size,
        **({} if placed.place is None else {PLACE_KEY: placed.place}),
    }
    saver = Saver(
        root=root,
        run=choose_run(config.checkpoint, components.mesh),
        engine=components.engine,
        mesh=components.mesh,
        config_yaml=config_yaml,
        extra=extra,
        with_optimizer=not config.checkpoint.no_save_optim,
        saved_iteration=resumed.state.iteration if goes_on_in_root else None,
        lock=lock,
        retention=Retention(config.checkpoint.keep_last, config.checkpoint.keep_every),
        scales=components.scales,
        background=_background(config, components.mesh),
    )
    last = _last_iteration(config, resumed.state, components.mesh.topology.world_size)
    steps = steps_to_save(resumed.state.iteration, last, config.checkpoint.save_interval)
    if notice := saver.check_space(steps, saved_kinds(optimizer_choice(config.optimizer))):
        console.line(notice)
    if last > resumed.state.iteration or not goes_on_in_root:  # what only evaluates leaves the training's file there
        saver.begin()
    return saver


def _background(config: RunConfig, mesh: Mesh) -> BackgroundSave | None:
    """Return what saves beside training, if the run does; a collective call."""
    if not config.checkpoint.async_save:
        return None
    return BackgroundSave(second_control(mesh, derived.collective_limit_minutes(config.limits)), mesh.meter)


def _announce_start(
    journal: Journal, config: RunConfig, saver: Saver, resumed: _Resumed, nodes: Nodes, console: Console
) -> None:
    """Write this start, and the settings that it has changed, to the journal; print whose checkpoints it saves."""
    source, mesh = resumed.checkpoint, saver.mesh
    begins = source is None or config.checkpoint.finetune
    console.line(f"{saver.run} {'begins' if begins else 'goes on'}: checkpoints in {saver.root}")
    if source is not None and not begins and PROGRESS_KEY not in source.progress:
        console.line(f"{source.folder} names no run, as one of an earlier version: its run has this id from now on")
    passed_over = [each.path.name for each in list_steps(saver.root) if each.step > resumed.state.iteration]
    if passed_over and source is not None and not is_from_root(source, saver.root):
        console.line(
            f"{saver.root} holds later checkpoints of this run, up to {passed_over[-1]}, which are not taken:"
            f" it goes on from {source.folder}, and replaces those of steps that it saves again"
        )
    journal.write(
        "start",
        run=saver.run.id,
        host=socket.gethostname(),
        pid=os.getpid(),
        job=job_name(),
        world_size=mesh.topology.world_size,
        layout=f"{mesh.topology.describe()} on {mesh.device.type}",
        ranks_per_node=nodes.sizes(),
        iteration=resumed.state.iteration,
        checkpoint=None if source is None else str(source.folder),
        finetune=config.checkpoint.finetune,
        megazero=megazero.__version__,
        torch=torch.__version__,
    )
    if resumed.fallback:
        journal.write("fallback", report=resumed.fallback)
    for change in () if source is None or begins else changed_settings(source, config):
        journal.write("change", **change)
