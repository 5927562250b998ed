"""Tests of running the pages' commands: blocks in the order of README.md's list, marks, records, blocks left out."""

import json
from pathlib import Path

import pytest
from page_commands import blocks, main, read_records

README = """# A project

Its [first page](docs/first.md) has a picture.

## Pages

| [docs/second.md](docs/second.md) |
| [docs/first.md](docs/first.md) |

<!-- run small:
seq 1000 => seq 3
-->

```bash
seq 1000 >runs/numbers  # many
```
"""
SECOND = """# The second page

```bash
cat >runs/words <<'END'
some words
END
cat runs/words runs/numbers | wc -l >runs/count; false
```
"""
FIRST = """# The first page

<!-- not run: it needs
two nodes -->

```bash
torchrun --nnodes 2 x.py
```
"""


def missing(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the names of the blocks that --missing lists."""
    capsys.readouterr()
    status = main([*words, "--missing"])
    listed = "".join(capsys.readouterr()).splitlines()
    assert status == bool(listed)
    return [line.partition(":")[0] for line in listed]


def test_blocks_run_in_order_and_are_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree, folder, records, page = (tmp_path / name for name in ("tree", "place", "records.jsonl", "page.md"))
    for name, text in {"README.md": README, "docs/first.md": FIRST, "docs/second.md": SECOND}.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    order = ["README.md", "docs/second.md", "docs/first.md"]
    assert [block.page for block in blocks(tree)] == order
    assert blocks(tree)[1].files() == {"runs/words": "some words\n"}
    own_files = folder / "megatron" / "checkpoints"  # as in a folder that an earlier start has made
    for path in (folder / "runs", own_files):
        path.mkdir(parents=True)
    (own_files / "latest_checkpointed_iteration.txt").touch()
    words = ["--records", str(records), "--tree", str(tree), "--folder", str(folder), "--output", str(page)]
    assert missing(words, capsys) == [f"{order[0]}, block 1", f"{order[1]}, block 1", f"{order[2]}, block 1"]
    assert not records.exists()
    assert main(words) == 1  # the second block fails
    assert missing(words, capsys) == [f"{order[1]}, block 1"]
    assert (folder / "runs" / "count").read_text().strip() == "4"
    (tree / "docs" / "second.md").write_text(SECOND.replace("; false", ""))
    (folder / "runs" / "numbers").write_text("1\n")
    assert main(words) == 0
    assert main([*words, "--missing"]) == 0 and missing(words, capsys) == []
    assert (folder / "runs" / "count").read_text().strip() == "2"  # the first block did not run again
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert [row.get("status") for row in rows] == [0, 1, None, 0]
    assert [row["page"] for row in read_records(records, tree).values()] == order
    assert "3 blocks, 2 run, 2 of them to their end" in page.read_text() and "`seq 1000` => `seq 3`" in page.read_text()
    (tree / "docs" / "first.md").write_text(FIRST.replace("<!-- not run: it needs\ntwo nodes -->\n", ""))
    assert missing(words, capsys) == [f"{order[2]}, block 1"]  # a block that runs from now on
    assert "it needs two nodes | not run" in page.read_text() and "as it stands | status 0" in page.read_text()


def test_a_mark_without_its_arrow_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(README.replace(" => ", " -> "))
    with pytest.raises(ValueError, match="a mark without =>"):
        blocks(tmp_path)
