"""No file of the repository names a path of the machine that it was written on."""

import re

from support.source_tree import ROOT, repository_files

# Written in pieces, so that this file doesn't find itself.
FORBIDDEN = re.compile(
    "|".join(
        (
            r"(?<![\w.])/" + r"work/",
            r"\.\./" + r"shared",
            r"\bissue" + r" #?\d",
            r"\b(DESIGN|STYLE|FLAGS|FORMATS|ANCHORS|TORCH|PEERS)" + r"\.md\b",
            r"(?<![\w.])/" + r"root/",
        )
    )
)


def test_nothing_points_outside() -> None:
    found = []
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in FORBIDDEN.finditer(text)]
    assert found == []


def test_the_check_sees_what_it_looks_for() -> None:
    assert FORBIDDEN.search("see /" + "work/main") and FORBIDDEN.search("issue" + " 12")
    assert not FORBIDDEN.search("a framework/part, /home/user/network/x")
