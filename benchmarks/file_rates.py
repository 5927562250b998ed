"""Measures how fast files of model states are written and read, beside threads that write and read without checksums.

    python benchmarks/file_rates.py --folder /tmp [--mib 1024] [--queue-depth 4 8] [--block-kib 1024] [--output PAGE.md]

`blocks` is a BlockFile: its file is cut into blocks that have checksums, each written or read by one of the threads.
`plain` is as many threads that do nothing else but pwrite and preadv, each every so manieth block.  Both transfer the
whole of one aligned buffer, past the page cache where the file system allows it, and each has a file of its own, which
is written once before anything is timed.  They take turns, so that whatever else the disk does hits both alike.

The ratio is the median of the turns' ratios of rates, and is to be 0.85 or more.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from threading import Thread

from report import MIB, HelpFormat, add_output, heading, paragraph, publish, table, tell
from torch import Tensor

from megazero.memory.block_file import ALIGNMENT, AlignedMemory, BlockFile, BlockIO
from megazero.memory.ledger_interface import NullLedger
from megazero.operating_system import bypass_page_cache, reserve_space

AIM = 0.85


class PlainFile:
    """A file that threads write and read whole, a block at a time, without checksums and requests."""

    def __init__(self, folder: Path, nbytes: int, *, block_bytes: int, num_threads: int) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (lives until close)
        reserve_space(self._file.fileno(), nbytes)
        bypass_page_cache(self._file.fileno(), ALIGNMENT)
        self._starts = range(0, nbytes, block_bytes)
        self._num_threads = num_threads

    def write(self, memory: Tensor) -> None:
        self._in_threads(memory, lambda part, at: os.pwrite(self._file.fileno(), part, at))

    def read(self, memory: Tensor) -> None:
        self._in_threads(memory, lambda part, at: os.preadv(self._file.fileno(), [part], at))

    def close(self) -> None:
        self._file.close()

    def _in_threads(self, memory: Tensor, call: Callable[[memoryview, int], int]) -> None:
        view, done = memory.numpy().data, [0] * self._num_threads

        def share(index: int) -> None:
            for at in self._starts[index :: self._num_threads]:
                done[index] += call(view[at : at + self._starts.step], at)

        threads = [Thread(target=share, args=(index,)) for index in range(self._num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(done) == memory.nbytes, f"{sum(done)} of {memory.nbytes} bytes"


@dataclass
class Rates:
    """The bytes a second of every turn, with blocks and plain."""

    blocks: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The median ratio of two rates of one turn."""
        return statistics.median(ours / plain for ours, plain in zip(self.blocks, self.plain, strict=True))

    def cells(self) -> list[str]:
        return [*(f"{statistics.median(one) / 1e9:.3f}" for one in (self.blocks, self.plain)), f"{self.ratio:.2f}"]


@dataclass
class Case:
    """The rates with so many threads and blocks of so many bytes.  is_direct: whether past the page cache."""

    queue_depth: int
    block_bytes: int
    is_direct: bool = False
    write: Rates = field(default_factory=Rates)
    read: Rates = field(default_factory=Rates)

    def cells(self) -> list[str]:
        size = f"{self.block_bytes // 1024} KiB"
        return [str(self.queue_depth), size, *self.write.cells(), *self.read.cells()]


def measure(case: Case, folder: Path, memory: Tensor, turns: int) -> None:
    """Add the rates of so many turns to a case.  memory: what is written; it is then read into."""
    io = BlockIO(block_bytes=case.block_bytes, queue_depth=case.queue_depth)
    plain = PlainFile(folder, memory.nbytes, block_bytes=case.block_bytes, num_threads=case.queue_depth)
    with closing(io), closing(plain), closing(BlockFile(folder, "blocks", memory.nbytes, io)) as blocks:
        case.is_direct = blocks.is_direct
        blocks.write(0, memory).wait()
        plain.write(memory)
        for number in range(turns):
            for rates, ours, theirs in ((case.write, blocks.write, plain.write), (case.read, blocks.read, plain.read)):
                pair = [
                    (rates.blocks, lambda ours=ours: ours(0, memory).wait()),
                    (rates.plain, lambda theirs=theirs: theirs(memory)),
                ]
                for taken, work in reversed(pair) if number % 2 else pair:
                    start = time.perf_counter()
                    work()
                    taken.append(memory.nbytes / (time.perf_counter() - start))


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="folder of the files, on the disk that is measured")
    add("--mib", type=int, default=1024, help="size of each of the two files")
    add("--queue-depth", type=int, nargs="+", default=[4, 8], help="threads")
    add("--block-kib", type=int, nargs="+", default=[1024], help="sizes of blocks, multiples of 4")
    add("--turns", type=int, default=5, help="turns of each case")
    add_output(parser)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    pool = AlignedMemory(is_pinned=False, ledger=NullLedger())
    memory = pool.lease(options.mib * MIB).random_()
    cases = [Case(depth, kib * 1024) for depth, kib in product(options.queue_depth, options.block_kib)]
    for case in cases:
        measure(case, options.folder, memory, options.turns)
        tell(f"{case.queue_depth} threads, blocks of {case.block_bytes // 1024} KiB: {', '.join(case.cells()[2:])}")
    rates = [f"{way}, {name}" for way in ("written", "read") for name in ("blocks, GB/s", "plain, GB/s", "ratio")]
    cache = "past the page cache" if all(case.is_direct for case in cases) else "through the page cache"
    words_on_page = (
        f"Two files of {options.mib} MiB, {cache}: `blocks` have checksums, `plain` is threads that do nothing but"
        f" pwrite and preadv. Medians of {options.turns} turns; a ratio is to be {AIM} or more."
    )
    publish(
        [
            heading("Rates of files of model states", "cpu"),
            paragraph(words_on_page),
            table(["threads", "block", *rates], [case.cells() for case in cases]),
        ],
        options.output,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
