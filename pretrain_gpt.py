"""Pretrain a GPT: `torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 --zero-stage 2 ...`."""

import sys

from megazero.comm.build import Launch, choose_device, join, leave
from megazero.comm.last_word import last_word
from megazero.config.cli import parse
from megazero.console import Console, run_program
from megazero.memory.ledger import open_ledger
from megazero.train.build import assemble, check
from megazero.train.loop import train


def main() -> int:
    """Read the command line, check it, join the other ranks, build the run, train; returns the exit status."""
    launch = Launch.from_environment()
    parsed = parse(world_size=launch.world_size)
    for notice in parsed.notices:
        Console().line(notice)
    inputs = check(parsed.config, launch)

    parallel = parsed.config.parallel
    device = choose_device(parallel.device, launch.local_rank)
    store = join(
        launch,
        backend=parallel.distributed_backend,
        device=device,
        timeout_minutes=parallel.distributed_timeout_minutes,
    )
    try:
        logging = parsed.config.logging
        ledger = open_ledger(device, kept=logging.ledger, limit_mib=logging.ledger_limit)
        with last_word(store, launch.rank), ledger:
            run = assemble(parsed.config, launch, device, inputs, ledger)
            train(run)
    finally:
        leave()
    stopped = run.state.iteration < run.timetable.train_iters
    return parsed.config.training.exit_status_when_stopped or 0 if stopped else 0


if __name__ == "__main__":
    sys.exit(run_program(main))
