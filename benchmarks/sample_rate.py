"""Measures how fast a corpus of a thousand million documents opens, and how fast its samples are read.

    python benchmarks/sample_rate.py [--documents 1e9] [--seq-length 1024] [--samples 20000] [--prefix PREFIX]

Without a prefix a corpus is made up that takes next to no disk: sparse files, whose documents are empty but for the
last, and whose tokens are all 0.  Its index has the size of a real one, and reading it touches as many pages; only the
disk is not measured, for the holes of sparse files are never read from it.  Give the prefix of a real corpus to measure
the disk too.

For opening in a new process the seconds and the growth of memory are printed; for samples in the order of a run the
microseconds of each, median and quartiles, from one corpus by memory map, by positional reads, and from the corpus
mixed seven times with itself.
"""

import argparse
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megazero.data.blend import BlendedSamples
from megazero.data.indexed_dataset import HEADER, LARGEST_LENGTH, MAGIC, VERSION, IndexedDataset
from megazero.data.samples import Samples, SampleSource
from megazero.data.storage import Access
from megazero.units import format_bytes, format_count

# The number of sequences with tokens in the made-up corpus, its last ones: 137 thousand million tokens of two bytes.
LONG = 64
UINT16 = 8

OPENING = """
import sys, time
from megazero.data.indexed_dataset import IndexedDataset

def resident():
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * 4096

before, start = resident(), time.perf_counter()
IndexedDataset(sys.argv[1])
print(time.perf_counter() - start, resident() - before)
"""


def make_sparse_corpus(prefix: Path, documents: int) -> None:
    """Write a valid corpus: only its last LONG sequences have tokens, and all documents but the last are empty."""
    starts = [2 * LARGEST_LENGTH * number for number in range(LONG)]
    with open(f"{prefix}.idx", "wb") as stream:
        stream.write(HEADER.pack(MAGIC, VERSION, UINT16, documents, documents + 1))
        stream.seek(HEADER.size + 4 * (documents - LONG))
        stream.write(struct.pack(f"<{LONG}i", *[LARGEST_LENGTH] * LONG))
        stream.seek(HEADER.size + 12 * documents - 8 * LONG)
        stream.write(struct.pack(f"<{LONG}q", *starts))
        stream.seek(HEADER.size + 20 * documents)
        stream.write(struct.pack("<q", documents))
    with open(f"{prefix}.bin", "wb") as stream:
        stream.truncate(2 * LARGEST_LENGTH * LONG)


def describe_opening(prefix: str) -> str:
    """Open a corpus in a new process, and describe the time and the growth of memory, without those of imports."""
    done = subprocess.run([sys.executable, "-c", OPENING, prefix], capture_output=True, text=True, check=True)
    seconds, grown = map(float, done.stdout.split())
    return f"opened in {1e3 * seconds:.1f} ms, memory grew by {format_bytes(int(grown))}"


def describe_samples(name: str, source: Samples, count: int) -> str:
    """Time `count` samples one by one, and describe the median and the quartiles."""
    taken = []
    for k in range(count):
        start = time.perf_counter()
        source.sample(k)
        taken.append(1e6 * (time.perf_counter() - start))
    low, median, high = statistics.quantiles(taken, n=4)
    return f"{name:12} {median:6.1f} us ({low:.1f} to {high:.1f})"


def measure(prefix: str, seq_length: int, count: int) -> None:
    print(describe_opening(prefix))
    sources = {}
    for name, maps in (("mapped", True), ("positional", False)):
        dataset = IndexedDataset(prefix, Access(maps=maps))
        everything = range(dataset.num_sequences)
        sources[name] = [
            SampleSource(
                dataset, sequences=everything, seq_length=seq_length, seed=1234, vocab_size=1 << 31, stream=stream
            )
            for stream in range(7)
        ]
    print(f"{format_count(dataset.num_documents)} documents, {format_count(dataset.num_tokens)} tokens")
    print(describe_samples("mapped", sources["mapped"][0], count))
    print(describe_samples("positional", sources["positional"][1], count))
    print(describe_samples("7 mixed", BlendedSamples(sources["mapped"], [1, 2, 3, 4, 5, 6, 7]), count))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the opening of a corpus, and a sample's time.")
    parser.add_argument("--documents", type=float, default=1e9, help="of the made-up corpus (default: 1e9)")
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--prefix", help="a corpus to measure instead")
    arguments = parser.parse_args()
    if arguments.prefix:
        measure(arguments.prefix, arguments.seq_length, arguments.samples)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_sparse_corpus(Path(folder) / "sparse", int(arguments.documents))
        measure(str(Path(folder) / "sparse"), arguments.seq_length, arguments.samples)


if __name__ == "__main__":
    main()
