"""Counts the process groups that a rank makes at start-up, in jobs of any size, and times how it does.

Every layout is that of one rank, in a process of its own, of a job of torch's fake process group, which connects
nothing: seconds are those of the list of splits, and of making groups as torch counts them by `new_group` for every
group of the job.  What a real backend takes to connect is not among them.
"""

import argparse
import sys
import time
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch
import torch.distributed as dist
from report import HelpFormat, add_output, heading, new_record, paragraph, publish, table
from torch.testing._internal.distributed.fake_pg import FakeStore
from turns import resident_bytes

from megazero.comm.groups import Limits, group_maker, splits
from megazero.parallel.topology import Topology

LAYOUTS = ((8, 16, 8), (8, 256, 8), (16, 128, 8))  # pipeline, data, tensor


class Counts(NamedTuple):
    """The groups of a job, those of its first rank, and what the list and all groups take: seconds and bytes.

    resident: bytes of the process with its imports alone, with the list, and with all groups.
    """

    ranks: int
    groups: int
    splits: int
    own: int
    list_seconds: float
    list_bytes: int
    all_seconds: float
    resident: tuple[int, int, int]


def count(pp: int, dp: int, tp: int) -> Counts:
    """Return the counts of a job of this layout, as its first rank makes them."""
    topology = Topology(pp=pp, dp=dp, tp=tp)
    before = resident_bytes()
    began = time.perf_counter()
    planned = splits(topology)
    own = sum(split.colour_of(0) is not None for split in planned)
    list_seconds, with_list = time.perf_counter() - began, resident_bytes()
    tracemalloc.start()
    kept = splits(topology)
    list_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    dist.init_process_group("fake", rank=0, world_size=topology.world_size, store=FakeStore())
    maker = group_maker(torch.device("cpu"), Limits(None, None))
    began = time.perf_counter()
    for split in kept:
        maker.make(split, 0)
    all_seconds, resident = time.perf_counter() - began, (before, with_list, resident_bytes())
    dist.destroy_process_group()
    total = sum(len(split.groups) for split in planned)
    return Counts(topology.world_size, total, len(planned), own, list_seconds, list_bytes, all_seconds, resident)


ABOUT = """What a rank makes, beside what all ranks made while each took part in every group of the job. The list is the
whole start-up of groups that is independent of the backend; one split is one call on NCCL, and its colours are the
list's groups. New_group for all is timed on torch's fake process group, whose groups connect nothing. Resident memory
is the whole process's, of which its imports are the first figure; groups of a real backend have buffers besides."""
HEADER = ("pipeline x data x tensor", "ranks", "groups of the job", "splits", "made by a rank", "list, s", "list, MiB")
HEADER = (*HEADER, "new_group for all, s", "resident MiB: imports, with the list, with all groups")


def main(layouts: Sequence[tuple[int, int, int]] = LAYOUTS) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    add_output(parser)
    options = parser.parse_args(sys.argv[1:])
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        counts = pool.map(count, *zip(*layouts, strict=True))
        found = {" x ".join(map(str, layout)): one for layout, one in zip(layouts, counts, strict=True)}
    rows = [
        (
            *(name, one.ranks, one.groups, one.splits, one.own),
            *(f"{one.list_seconds:.3f}", f"{one.list_bytes / 2**20:.1f}", f"{one.all_seconds:.2f}"),
            ", ".join(f"{nbytes / 2**20:.0f}" for nbytes in one.resident),
        )
        for name, one in found.items()
    ]
    parts = [heading("Process groups at start-up", "cpu"), table(HEADER, rows), paragraph(ABOUT)]
    record = new_record("start_up_groups", "cpu", layouts={name: one._asdict() for name, one in found.items()})
    publish(parts, options.output, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
