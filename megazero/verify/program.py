"""Verifications once their command line has been checked: join the other ranks, compare, leave."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megazero.comm.faults.monitor import place_in_job
from megazero.comm.faults.shutdown import reported_faults
from megazero.comm.metered import Meter
from megazero.comm.startup import choose_device, destroy_process_groups, join, make_mesh
from megazero.config import derived
from megazero.config.run import RunConfig
from megazero.console import Console
from megazero.library.config import load_engine_config
from megazero.memory.fused_buffers import FusedBuffers
from megazero.model.compiled import check_compiler
from megazero.parallel.launch import Launch
from megazero.parallel.threads import use_cpu_threads
from megazero.train.attention_kernel import check_attention
from megazero.train.decisions import Decide, decide_first, decided, nothing_decides
from megazero.train.determinism import use_deterministic_mode
from megazero.train.start.check import topology
from megazero.train.start.inputs import RunInputs
from megazero.verify.configuration import exact, in_float64, in_stage
from megazero.verify.module import verify_module as verify_user_module
from megazero.verify.side_by_side import PrintLine, verify
from megazero.verify.verdict import Report
from megazero.zero.plan import wires


def verify_layout(
    config: RunConfig, launch: Launch, inputs: RunInputs, decide: Decide = nothing_decides, *, steps: int
) -> Report:
    """Compare `steps` steps of the layout with those of one process; decide: as for a run."""
    parallel, minutes = config.parallel, derived.collective_limit_minutes(config.limits)
    device = choose_device(parallel.device, launch)
    check_attention(config.training.attention_backend, device)
    decision = decide_first(config, None, device, launch, decide)
    use_cpu_threads(parallel.cpu_threads, launch, device, offloads=config.zero.offloads)
    compiler = check_compiler(
        config.training.compile,
        device,
        cuts_rows=config.curriculum.curriculum_learning,
        records_passes=config.training.enable_cuda_graph,
    )
    for notice in (*use_deterministic_mode(config, device), *compiler):
        Console(launch.rank).line(notice)
    joining = derived.join_limit_minutes(config.limits)
    store = join(
        launch,
        backend=parallel.distributed_backend,
        device=device,
        timeout_minutes=minutes,
        join_minutes=joining,
    )
    config, reasons = decided(config, decision, store)
    for reason in reasons:
        Console(launch.rank).line(reason)
    layout, meter = topology(in_float64(config), launch.world_size, launch.nodes), Meter()
    job = place_in_job(launch.rank, layout, limit_seconds=60 * minutes, folder=".", is_run=True)
    try:
        with reported_faults(store, meter.flight, job):
            buffers = FusedBuffers(0, device)
            mesh = make_mesh(
                layout,
                launch.rank,
                device,
                buffers,
                timeout_minutes=minutes,
                join_minutes=joining,
                meter=meter,
                wires=wires(exact(config.zero)),
                nodes=launch.nodes,
            )
            return verify(config, mesh, buffers, inputs, steps=steps, print_line=Console(launch.rank).line)
    finally:
        destroy_process_groups()


def verify_module(
    functions: Sequence[Callable[..., Any]],
    config: str | None,
    *,
    stage: int | None,
    steps: int | None,
    print_line: PrintLine,
) -> Report:
    """Compare a user's module in the library's engine with plain PyTorch on one process.

    functions: those that make the module, compute a loss, make batches, and maybe an optimizer.  config: the path of a
    configuration; None: AdamW, where no function makes an optimizer.  stage: the ZeRO stage in place of that of the
    configuration.
    """
    make_model, loss, batches, *optimizers = functions
    optimizer = optimizers[0] if optimizers else None
    default = {} if optimizers else {"optimizer": {"type": "AdamW", "lr": 1e-3}}
    settings = load_engine_config(default if config is None else config)
    settings = replace(settings, zero=in_stage(settings.zero, stage))
    try:
        made = batches()
        return verify_user_module(
            make_model, loss, made, settings, optimizer=optimizer, steps=steps, print_line=print_line
        )
    finally:
        destroy_process_groups()
