"""Tests of the histogram of document lengths, as lines of text and as an SVG picture."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from megazero.errors import DataError
from megazero.prepare.inspect.lengths import count_lengths, length_lines, length_picture, write_length_picture

LENGTHS = count_lengths([np.array([0, 1, *[2] * 3, *[1500] * 6])])
EMPTY = count_lengths([])


def test_lines_have_figures_and_bars() -> None:
    summary, empty, _, *rows = length_lines(LENGTHS)
    assert "shortest 0, median 1500, mean 818.8, 95th percentile 1500, longest 1500 tokens" in summary
    assert empty.endswith("1 of 11 documents")
    assert [row.split()[0] for row in rows] == [
        "0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64-127", "128-255", "256-511", "512-1023", "1024-2047",
    ]  # fmt: skip
    assert rows[-1].split()[1:6] == ["6", "54.5", "%", "99.9", "%"]
    full = rows[-1].count("█")
    assert full == 40 and rows[2].count("█") == full / 2 and "█" not in rows[3]


def test_a_corpus_without_documents_has_no_bars() -> None:
    assert len(length_lines(EMPTY)) == 3
    assert 'class="bar' not in length_picture(EMPTY, title="x")


def test_columns_are_to_scale() -> None:
    tree = ElementTree.fromstring(length_picture(LENGTHS, title="a < b"))
    documents, tokens = (
        [element for element in tree.iter() if element.get("class") == f"bar {noun}"]
        for noun in ("documents", "tokens")
    )
    heights = [float(bar.get("height", "")) for bar in documents]
    assert len(documents) == len(tokens) == 12 and max(heights) == heights[-1] and heights[3] == 0
    assert heights[-1] == pytest.approx(2 * heights[2], abs=0.02)
    # Shares of documents and of tokens have one scale: 6 of 11 documents have 9000 of 9007 tokens.
    assert float(tokens[-1].get("height", "")) == pytest.approx(heights[-1] * (9000 / 9007) / (6 / 11), abs=0.1)
    bars = [*documents, *tokens]
    feet = {round(float(bar.get("y", "")) + float(bar.get("height", "")), 1) for bar in bars}
    edges = [float(bar.get("x", "")) + float(bar.get("width", "")) for bar in bars]
    assert min(edges) < 100 and max(edges) > 900
    assert len(feet) == 1
    text = [element.text for element in tree.iter() if element.text]
    assert "Documents by length: a < b" in text and "1024-2047 tokens: 6 documents" in text and "1Ki" in text


def test_it_is_written_or_refused(tmp_path: Path) -> None:
    write_length_picture(tmp_path / "p.svg", LENGTHS, title="x")
    assert (tmp_path / "p.svg").read_text() == length_picture(LENGTHS, title="x")
    (tmp_path / "file").touch()
    with pytest.raises(DataError):
        write_length_picture(tmp_path / "file" / "p.svg", LENGTHS, title="x")
