"""Verifies a corpus: its index is consistent, its files are unchanged, its ids are in the vocabulary."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import xxhash

from megazero.console import Console
from megazero.data.indexed_dataset import CHECK_BLOCK, IndexedDataset, idx_path
from megazero.data.sidecar import Sidecar, digest_of
from megazero.errors import DataError, Problem, raise_problems

Advance = Callable[[int], None]


class TokenScan(NamedTuple):
    """The result of reading all tokens: the least and the largest id ((0, -1) without tokens), the .bin's digest."""

    lowest: int
    highest: int
    digest: str


def verify(dataset: IndexedDataset, sidecar: Sidecar | None, vocab_size: int | None, console: Console) -> list[str]:
    """Read the whole corpus, with progress bars; return lines with the results for the user.

    Raises DataError with all problems.
    """
    with console.progress() as progress:
        entries, of_bin, of_idx = (progress.add_task(name, total=None) for name in ("index", "tokens", "digest"))

        def checked(done: int, in_all: int) -> None:
            progress.update(entries, completed=done, total=in_all)

        problems: list[Problem] = []
        try:
            dataset.check(checked)
        except DataError as error:
            problems += error.problems
        progress.update(of_bin, total=dataset.num_tokens)
        scan = scan_tokens(dataset, lambda tokens: progress.advance(of_bin, tokens))
        problems += token_problems(dataset, scan, vocab_size)
        known = sidecar.digests if sidecar else {}
        found = {"bin": scan.digest}
        if "idx" in known:
            found["idx"] = digest_of(idx_path(dataset.prefix), lambda nbytes: progress.advance(of_idx, nbytes))
        problems += digest_problems(dataset, known, found)
    raise_problems(DataError, problems)
    verdict = f"{' and '.join(known)} are as written" if known else "the .json has none to compare with"
    return [f"ids            {scan.lowest} to {scan.highest}", "index          consistent", f"digests        {verdict}"]


def scan_tokens(dataset: IndexedDataset, advance: Advance) -> TokenScan:
    """Read every token, a block at a time; call advance(tokens) after each."""
    lowest, highest, digest = 0, -1, xxhash.xxh3_128()
    for start in range(0, dataset.num_tokens, CHECK_BLOCK):
        block = dataset.tokens(start, min(start + CHECK_BLOCK, dataset.num_tokens))
        digest.update(block.data)
        low, high = int(block.min()), int(block.max())
        lowest, highest = min(lowest, low) if start else low, max(highest, high)
        advance(len(block))
    return TokenScan(lowest, highest, digest.hexdigest())


def token_problems(dataset: IndexedDataset, scan: TokenScan, vocab_size: int | None) -> list[Problem]:
    """Return the problem of ids outside the vocabulary."""
    if scan.lowest >= 0 and (vocab_size is None or scan.highest < vocab_size):
        return []
    rule = "ids are at least 0" + ("" if vocab_size is None else f" and below the vocabulary size {vocab_size}")
    return [Problem(f"{dataset.name}: ids from {scan.lowest} to {scan.highest}", rule)]


def digest_problems(dataset: IndexedDataset, known: Mapping[str, str], found: Mapping[str, str]) -> list[Problem]:
    """Return the problems of files that have changed since they were written; known: the sidecar's digests."""
    return [
        Problem(
            f"{dataset.name}.{ending}: xxh3_128 {found[ending]}",
            f"the file is as it was written, with the digest {digest} in the .json beside it",
            "an undamaged copy, or preprocess the text again",
        )
        for ending, digest in known.items()
        if ending in found and found[ending] != digest
    ]
