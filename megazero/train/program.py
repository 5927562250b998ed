"""The run after its command line has been checked: join the other ranks, build, train, shut down.

Programs import this module only after that check: it loads torch, which takes longer than all other imports together.
"""

from megazero.checkpoint.journal import Journal
from megazero.comm.faults.monitor import place_in_job
from megazero.comm.faults.shutdown import reported_faults
from megazero.comm.metered import Meter
from megazero.comm.startup import choose_device, destroy_process_groups, join
from megazero.config import derived
from megazero.config.run import RunConfig
from megazero.console import Console
from megazero.memory.ledger import open_ledger
from megazero.model.compiled import check_compiler
from megazero.parallel.launch import Launch
from megazero.parallel.threads import use_cpu_threads
from megazero.tensor_parallel.float8 import check_device
from megazero.tensor_parallel.float32 import use_tf32
from megazero.train.attention_kernel import check_attention
from megazero.train.build import assemble, check_checkpoint, check_param_groups, open_journal
from megazero.train.decisions import Decide, decide_first, decided, nothing_decides
from megazero.train.determinism import use_deterministic_mode
from megazero.train.loop import train
from megazero.train.start.check import topology
from megazero.train.start.inputs import RunInputs


def pretrain(config: RunConfig, launch: Launch, inputs: RunInputs, decide: Decide = nothing_decides) -> int:
    """Build the run and train; return the exit status of the process.

    decide: decides the settings that are "auto", on rank 0.
    """
    found = check_checkpoint(config, inputs, launch.world_size)
    check_param_groups(config, inputs.vocab_size)
    parallel, logging = config.parallel, config.logging
    device = choose_device(parallel.device, launch)
    check_attention(config.training.attention_backend, device)
    decision = decide_first(config, found, device, launch, decide)
    if threads := use_cpu_threads(parallel.cpu_threads, launch, device, offloads=config.zero.offloads):
        Console(launch.rank).line(threads)
    keeps_ledger = logging.ledger or logging.ledger_limit is not None
    notices = (
        *use_deterministic_mode(config, device),
        *use_tf32(config.precision, device),
        *check_device(config.precision.fp8_format, device),
        *check_compiler(
            config.training.compile,
            device,
            keeps_ledger=keeps_ledger,
            cuts_rows=config.curriculum.curriculum_learning,
            records_passes=config.training.enable_cuda_graph,
        ),
    )
    for notice in notices:
        Console(launch.rank).line(notice)
    store = join(
        launch,
        backend=parallel.distributed_backend,
        device=device,
        timeout_minutes=derived.collective_limit_minutes(config.limits),
        join_minutes=derived.join_limit_minutes(config.limits),
    )
    config, reasons = decided(config, decision, store)
    for reason in reasons:
        Console(launch.rank).line(reason)
    meter = Meter()
    job = place_in_job(
        launch.rank,
        topology(config, launch.world_size),
        limit_seconds=60 * derived.collective_limit_minutes(config.limits),
        folder=config.checkpoint.save or ".",
        is_run=True,
        on_report=lambda lines: Journal(config.checkpoint.save, print).write("fault", report=lines),
    )
    journal = open_journal(config, launch)
    try:
        ledger = open_ledger(
            device, kept=logging.ledger, limit_mib=logging.ledger_limit, unit=lambda: meter.flight.unit
        )
        with reported_faults(store, meter.flight, job), ledger:
            run = assemble(config, launch, device, inputs, ledger, journal, meter)
            train(run)
    finally:
        destroy_process_groups()
    stopped = run.state.iteration < run.timetable.train_iters
    return config.training.exit_status_when_stopped or 0 if stopped else 0
