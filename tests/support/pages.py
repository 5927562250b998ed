"""The blocks of commands of README.md and docs/, as benchmarks/page_commands.py takes them out of the pages."""

import sys

from support.source_tree import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from page_commands import Block, blocks, make_commands, run

__all__ = ["Block", "block_with", "blocks", "make_commands", "run"]


def block_with(page: str, text: str) -> Block:
    """Return the block of a page that has this text in it."""
    (found,) = [block for block in blocks() if block.page == page and text in block.text]
    return found
