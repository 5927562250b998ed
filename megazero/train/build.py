"""From a configuration to a run: one function per noun, each given only its part.

`check.check` comes first; `check_checkpoint` needs no process group either.
`assemble` makes the mesh, the model, the engine, the data and the writers, and restores or initialises.
"""

from dataclasses import dataclass, replace

import torch

from megazero.activations.assemble import RankParts, activation_plan, describe
from megazero.activations.recompute_plan import ActivationPlan
from megazero.comm.local import LocalCommunicator
from megazero.comm.mesh import Mesh
from megazero.comm.startup import make_mesh
from megazero.config import derived
from megazero.config.run import RunConfig
from megazero.config.yaml_file import to_yaml
from megazero.console import Console
from megazero.data.loader import BatchLayout, BatchLoader
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.host import return_freed_memory
from megazero.memory.ledger_interface import AnyLedger, NullLedger
from megazero.model.compiled import compile_blocks, is_compiled
from megazero.model.gpt import GPT
from megazero.model.initial_values import initial_value
from megazero.optim.configured import make_optimizer, saved_kinds
from megazero.optim.loss_scaler import LossScaler
from megazero.optim.schedules import LearningRate, reconcile
from megazero.parallel.drawing import draw_layout
from megazero.parallel.launch import Launch
from megazero.pipeline.stage_plan import StagePlan
from megazero.pipeline.trace import NO_TRACE, AnyTrace, Trace
from megazero.report.ledger_report import LedgerReport
from megazero.report.memory_report import closing_lines, opening_line
from megazero.report.metrics import Rates, flops_per_token, peak_tflops
from megazero.report.pipeline_report import PipelineReport
from megazero.report.writers import open_writers
from megazero.rules.optimizer import optimizer_choice
from megazero.tensor_parallel.deferred import DeferredGradients
from megazero.tensor_parallel.float8 import float8_products
from megazero.tensor_parallel.layers import TensorParallel
from megazero.tensor_parallel.onednn import fastest_products
from megazero.tensor_parallel.random import RandomRegions
from megazero.timers import Timers
from megazero.train.check import topology
from megazero.train.context import StepParts
from megazero.train.evaluate import EvaluationSet
from megazero.train.inputs import RunInputs
from megazero.train.loop import Reporting, Run, Timetable
from megazero.train.pipeline_stages import activation_config, describe_stages, num_checkpoints, stage_chunks, stage_plan
from megazero.train.resolve_activations import settle_activations
from megazero.train.saving import (
    Saver,
    check_compatible,
    check_model,
    check_optimizer,
    check_shapes,
    find_checkpoint,
    has_stepped,
    restore_engine,
)
from megazero.train.state import TrainState
from megazero.zero.engine import Engine, EngineSettings
from megazero.zero.plan import DTYPES, resolve

_REPORTED_AS = {"valid": "validation", "test": "test"}


def check_checkpoint(config: RunConfig, inputs: RunInputs) -> None:
    """What keeps --load from working, as far as it can be told without reading tensors: a whole model on no device.

    Raises ConfigError or CheckpointError.
    """
    checkpoint = find_checkpoint(config.checkpoint)
    if checkpoint is None:
        return
    vocab_size = inputs.vocab_size
    check_model(checkpoint, replace(config.model, vocab_size=vocab_size))
    model = _without_memory(config, vocab_size=vocab_size)
    kinds: tuple[str, ...] = ("weight",)
    if not _takes_weights_only(config):
        choice = optimizer_choice(config.optimizer)
        check_optimizer(checkpoint, choice.type)
        kinds += saved_kinds(choice) if has_stepped(checkpoint) else ()
    check_shapes(checkpoint, model, kinds=kinds)
    if not config.checkpoint.finetune:
        check_compatible(checkpoint, seed=config.training.seed, seq_length=config.model.seq_length)


@dataclass(frozen=True)
class Core:
    """What computes: mesh, model, engine, dropout's random states, what becomes of activations, timers and buffers.

    plan: the pipeline stage.  deferred: where its schedule sets gradients aside, if it does.  trace: of its steps.
    compiled: what torch compiles, in words.
    """

    mesh: Mesh
    model: GPT
    engine: Engine
    random: RandomRegions
    activations: ActivationPlan
    timers: Timers
    buffers: FusedBuffers
    plan: StagePlan
    deferred: DeferredGradients | None
    trace: AnyTrace
    compiled: str | None = None


def build_core(
    config: RunConfig, mesh: Mesh, buffers: FusedBuffers, *, vocab_size: int, ledger: AnyLedger | None = None
) -> Core:
    """Model with its first values, and engine; `buffers` get the size the engine needs."""
    padded, stage = padded_vocab_size(config, vocab_size), mesh.coordinate("pp")
    are_written = config.logging.log_timers_to_tensorboard and config.logging.tensorboard_dir is not None
    timers = Timers(mesh.device, waits=are_written or config.activations.profile_backward)
    random = RandomRegions(config.training.seed, mesh.coordinate("tp"), mesh.device)
    rank = RankParts(mesh.axis("tp"), mesh.device, random, ledger or NullLedger(), timers)
    in_flight = derived.num_micro_batches(config, mesh.topology.world_size)
    held = num_checkpoints(config, stage, padded, in_flight)
    plan = stage_plan(config, stage)
    tp = tensor_parallel(config, mesh, random, splits_backward=plan.schedule == "zero-bubble")
    activations = activation_plan(activation_config(config), held, rank)
    model = GPT(
        config.model,
        vocab_size=vocab_size,
        tp=tp,
        padded_vocab_size=padded,
        activations=activations,
        chunks=stage_chunks(config, stage, padded),
    )
    engine = _build_engine(config, model, mesh, buffers, ledger or NullLedger())
    compiled = (
        compile_blocks(model, as_a_whole=tp.within_compiled)
        if is_compiled(config.training.compile, mesh.device)
        else None
    )
    tokens = config.training.micro_batch_size * config.model.seq_length
    activation_bytes = tokens * config.model.hidden_size * tp.dtype.itemsize if tp.border.splits_sequence else 0
    buffers.resize(max(engine.largest_buffer_bytes, activation_bytes))  # gloo's reduce-scatter borrows its input's size
    return_freed_memory(mesh.device)
    trace = NO_TRACE if config.logging.pipeline_trace_dir is None else Trace(mesh.device)
    return Core(mesh, model, engine, random, activations, timers, buffers, plan, tp.deferred, trace, compiled)


def _blocks_have_no_effects(config: RunConfig, splits_backward: bool) -> bool:
    """Whether all that a block's forward and backward do is to compute: nothing is sent, set aside, or run again."""
    is_recomputed = config.activations.recompute_granularity == "selective"
    return config.parallel.tensor_model_parallel_size == 1 and not (splits_backward or is_recomputed)


def tensor_parallel(config: RunConfig, mesh: Mesh, random: RandomRegions, *, splits_backward: bool) -> TensorParallel:
    """What the layers are told."""
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
        within_compiled=is_compiled(config.training.compile, mesh.device)
        and _blocks_have_no_effects(config, splits_backward),
    )


def _build_engine(config: RunConfig, model: GPT, mesh: Mesh, buffers: FusedBuffers, ledger: AnyLedger) -> Engine:
    settings = EngineSettings(
        config.zero,
        make_optimizer(optimizer_choice(config.optimizer), model),
        lambda spec, parameter: initial_value(spec, config.training.seed, like=parameter),
        ledger,
        parameter_names=_all_parameters(config, model) if mesh.topology.pp > 1 else (),
    )
    plan = resolve(config.zero, config.precision)
    return Engine(model, model.units(), plan, mesh=mesh, buffers=buffers, settings=settings)


def _all_parameters(config: RunConfig, part: GPT) -> tuple[str, ...]:
    """The names of the whole model's parameters, of which every stage holds a part."""
    return tuple(name for name, _ in _without_memory(config, vocab_size=part.vocab_size).named_parameters())


def _without_memory(config: RunConfig, *, vocab_size: int) -> GPT:
    """The whole model on no device."""
    meta = torch.device("meta")
    tp = TensorParallel(LocalCommunicator(), RandomRegions(0, 0, torch.device("cpu")), torch.float32, meta)
    return GPT(config.model, vocab_size=vocab_size, tp=tp, padded_vocab_size=vocab_size)


def padded_vocab_size(config: RunConfig, vocab_size: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks."""
    return derived.padded_vocab_size(
        vocab_size,
        divisible_by=config.model.make_vocab_size_divisible_by,
        tensor_parallel_size=config.parallel.tensor_model_parallel_size,
    )


def step_parts(config: RunConfig, core: Core) -> StepParts:
    """What every training step is given."""
    world_size = core.mesh.topology.world_size
    return StepParts(
        engine=core.engine,
        model=core.model,
        mesh=core.mesh,
        dropout=core.random,
        timers=core.timers,
        num_positions=derived.global_batch_size(config, world_size) * config.model.seq_length,
        clip_grad=config.optimizer.clip_grad,
        checks_overflow=core.engine.plan.may_overflow,
        ledger=core.engine.settings.ledger,
        plan=core.plan,
        deferred=core.deferred,
        trace=core.trace,
    )


def assemble(
    config: RunConfig, launch: Launch, device: torch.device, inputs: RunInputs, ledger: AnyLedger | None = None
) -> Run:
    """Everything a run needs, restored from a checkpoint or freshly initialised; a ledger that is kept sees it made."""
    config = replace(config, model=replace(config.model, vocab_size=inputs.vocab_size))
    console = Console(launch.rank)
    buffers = FusedBuffers(0, device, ledger=ledger)
    mesh = make_mesh(
        topology(config, launch.world_size),
        launch.rank,
        device,
        buffers,
        timeout_minutes=config.parallel.distributed_timeout_minutes,
    )
    padded = padded_vocab_size(config, inputs.vocab_size)
    drawing = draw_layout(mesh.topology, launch.nodes) if launch.world_size > 1 else []
    if drawing and not launch.ranks_per_node:
        console.line("the launcher doesn't say which rank is on which node (LOCAL_WORLD_SIZE): all are taken for one")
    for line in (*drawing, *describe_stages(config, padded)):
        console.line(line)
    activations, reasons = settle_activations(config, mesh, vocab_size=inputs.vocab_size, padded_vocab_size=padded)
    for reason in reasons:
        console.line(reason)
    config = replace(config, activations=activations)
    core = build_core(config, mesh, buffers, vocab_size=inputs.vocab_size, ledger=ledger)
    if core.compiled is not None:
        console.line(f"torch.compile: {core.compiled}, at the first step")
    train_iters = derived.train_iters(config, launch.world_size)
    scaler = LossScaler.from_config(config.precision)
    resumed = _resume(config, core, LearningRate.from_config(config.optimizer, train_iters=train_iters), scaler)
    layout = batch_layout(config, core.mesh, inputs.eod)
    return Run(
        parts=step_parts(config, core),
        state=resumed.state,
        scaler=scaler,
        learning_rate=resumed.learning_rate,
        loader=BatchLoader(
            inputs.train, layout, start_sample=resumed.state.consumed_samples, prefetch=config.data.num_workers
        ),
        held_out=_held_out(config, inputs, layout),
        timetable=_timetable(config, _last_iteration(config, resumed.state, launch.world_size)),
        saver=_saver(config, core, resumed),
        reporting=_reporting(config, console, core, inputs, resumed.state),
    )


def batch_layout(config: RunConfig, mesh: Mesh, eod: int | None) -> BatchLayout:
    """How a step's samples are dealt out over the data-parallel ranks."""
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
    state: TrainState
    learning_rate: LearningRate


def _resume(config: RunConfig, core: Core, schedule: LearningRate, scaler: LossScaler) -> _Resumed:
    """Where the run stands: at the start, or where a checkpoint left it."""
    checkpoint = find_checkpoint(config.checkpoint)
    if checkpoint is None:
        return _Resumed(TrainState(scaler.start()), schedule)
    weights_only = _takes_weights_only(config)
    restore_engine(checkpoint, core.engine, core.mesh, with_optimizer=not weights_only)
    if config.checkpoint.finetune:
        return _Resumed(TrainState(scaler.start()), schedule)
    state = TrainState.from_json(checkpoint.progress)
    if not (scaler.dynamic and checkpoint.progress.get("loss_scale_is_dynamic")):
        state.loss_scale = scaler.start()  # a constant says nothing about where a moving scale should stand
    if not weights_only:
        core.engine.optimizer_step.fill_(state.optimizer_steps)
    saved = checkpoint.progress.get("learning_rate")
    return _Resumed(state, reconcile(schedule, saved if isinstance(saved, dict) else {}, config.optimizer))


def _held_out(config: RunConfig, inputs: RunInputs, layout: BatchLayout) -> dict[str, EvaluationSet]:
    """Evaluation sets by the name they are reported under."""
    sources = {"valid": inputs.valid, "test": inputs.test}
    num_batches = config.training.eval_iters
    return {
        _REPORTED_AS[split]: EvaluationSet(source, layout, num_batches, inputs.bytes_per_token.get(split))
        for split, source in sources.items()
        if source is not None and num_batches > 0
    }


def _last_iteration(config: RunConfig, state: TrainState, world_size: int) -> int:
    """Where the run ends; a length in samples counts those taken so far, whose steps may have had another size."""
    samples = config.training.train_samples
    if samples is None:
        return derived.train_iters(config, world_size)
    left = max(samples - state.consumed_samples, 0)
    return state.iteration + left // derived.global_batch_size(config, world_size)


def _timetable(config: RunConfig, train_iters: int) -> Timetable:
    minutes = config.training.exit_duration_in_mins
    return Timetable(
        train_iters=train_iters,
        eval_interval=config.training.eval_interval,
        eval_at_start=config.training.eval_at_start,
        save_interval=config.checkpoint.save_interval,
        exit_interval=config.training.exit_interval,
        exit_after_seconds=None if minutes is None else 60 * minutes,
    )


def _saver(config: RunConfig, core: Core, resumed: _Resumed) -> Saver | None:
    root, source = config.checkpoint.save, config.checkpoint.load
    if root is None:
        return None
    goes_on_there = source is not None and source.resolve() in (root.resolve(), *root.resolve().glob("step_*"))
    extra = {
        "learning_rate": resumed.learning_rate.to_json(),
        "optimizer": optimizer_choice(config.optimizer).type,
        "loss_scale_is_dynamic": LossScaler.from_config(config.precision).dynamic,
        "seed": config.training.seed,
        "seq_length": config.model.seq_length,
    }
    saver = Saver(
        root=root,
        engine=core.engine,
        mesh=core.mesh,
        config_yaml=to_yaml(config),
        extra=extra,
        with_optimizer=not config.checkpoint.no_save_optim,
        already_there=resumed.state.iteration if goes_on_there and resumed.state.iteration else None,
    )
    saver.save_configuration()
    return saver


def _num_held(config: RunConfig, core: Core) -> int:
    """Checkpoints that this rank holds at once, at the most."""
    padded = padded_vocab_size(config, core.model.vocab_size)
    number = derived.num_micro_batches(config, core.mesh.topology.world_size)
    return num_checkpoints(config, core.plan.stage, padded, number)


def _mask_bytes(config: RunConfig) -> int:
    """Of one micro-batch's attention mask, which all layers share; 0 where there is none."""
    if not config.data.reset_attention_mask:
        return 0
    return config.training.micro_batch_size * config.model.seq_length**2 * DTYPES[config.precision.precision].itemsize


def _reporting(config: RunConfig, console: Console, core: Core, inputs: RunInputs, state: TrainState) -> Reporting:
    device, world_size = core.mesh.device, core.mesh.topology.world_size
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    flops = flops_per_token(config.model, vocab_size=inputs.vocab_size)
    writers = open_writers(
        config.logging,
        console=console,
        train_iters=_last_iteration(config, state, world_size),
        world_size=world_size,
        resumed_iteration=state.iteration,
    )
    logging = config.logging
    in_tensorboard = logging.tensorboard_dir is not None and (logging.ledger or logging.log_memory_to_tensorboard)
    ledger = LedgerReport(
        core.engine.settings.ledger,
        core.mesh.meter,
        rank=core.mesh.rank,
        folder=logging.ledger_dir,
        interval=logging.log_interval,
    )
    pipeline = PipelineReport(
        core.mesh, core.plan, core.trace, folder=logging.pipeline_trace_dir, interval=logging.log_interval
    )
    return Reporting(
        console=console,
        writers=writers,
        rates=Rates(flops, world_size, peak_tflops(name, precision=config.precision.precision)),
        global_batch_size=derived.global_batch_size(config, world_size),
        tokens_per_sample=config.model.seq_length,
        gathers_ranks=logging.metrics_file is not None or in_tensorboard,
        ledger=ledger,
        pipeline=pipeline,
        opening=opening_line(
            describe(activation_config(config), _num_held(config, core), core.mesh.topology.tp),
            core.activations.logits_chunk_bytes,
            core.buffers,
            mask_bytes=_mask_bytes(config),
        ),
        closing=lambda: [*pipeline.closing_lines(), *closing_lines(core.engine, core.activations.recomputation)],
    )
