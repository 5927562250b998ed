"""Tests the picture of a layout against literal pictures."""

import textwrap

from support.each import each

from megazero.parallel.drawing import draw_layout
from megazero.parallel.nodes import Nodes
from megazero.parallel.topology import Topology


def picture(text: str) -> list[str]:
    return textwrap.dedent(text).strip("\n").splitlines()


def test_one_rank_is_one_line() -> None:
    assert draw_layout(Topology(), Nodes((1,))) == ["1 rank, which has the whole model and every sample"]


def test_two_nodes() -> None:
    assert draw_layout(Topology(tp=2, dp=2, pp=2), Nodes((4, 4))) == picture(
        """
        pipeline 2 x data 2 x tensor 2 = 8 ranks on 2 nodes of 4 ranks; every rank with its (pp, dp, tp)
          node 0    0 (0,0,0)   1 (0,0,1)   2 (0,1,0)   3 (0,1,1)
          node 1    4 (1,0,0)   5 (1,0,1)   6 (1,1,0)   7 (1,1,1)
        who talks to whom, and on which nodes
          tensor    [0 1] node 0 | [2 3] node 0 | [4 5] node 1 | [6 7] node 1
          data      [0 2] node 0 | [1 3] node 0 | [4 6] node 1 | [5 7] node 1
          pipeline  [0 4] nodes 0 1 | [1 5] nodes 0 1 | [2 6] nodes 0 1 | [3 7] nodes 0 1
        """
    )


def test_another_order_on_uneven_nodes() -> None:
    assert draw_layout(Topology(tp=1, dp=3, pp=2, order=("dp", "tp", "pp")), Nodes((4, 2))) == picture(
        """
        pipeline 2 x data 3 x tensor 1 = 6 ranks on 2 nodes of 4,2 ranks; every rank with its (pp, dp, tp)
          node 0    0 (0,0,0)   1 (1,0,0)   2 (0,1,0)   3 (1,1,0)
          node 1    4 (0,2,0)   5 (1,2,0)
        who talks to whom, and on which nodes
          tensor    every rank alone
          data      [0 2 4] nodes 0 1 | [1 3 5] nodes 0 1
          pipeline  [0 1] node 0 | [2 3] node 0 | [4 5] node 1
        """
    )


def test_a_thousand_ranks_fit_a_page() -> None:
    lines = draw_layout(Topology(tp=8, dp=16, pp=8), Nodes((8,) * 128))
    assert lines[0].startswith("pipeline 8 x data 16 x tensor 8 = 1024 ranks on 128 nodes of 8 ranks;")
    assert lines[2:3] == [
        "  node   1     8 (0,1,0)      9 (0,1,1)     10 (0,1,2)     11 (0,1,3)     12 (0,1,4)   ...     15 (0,1,7)"
    ]
    assert lines[-6:-4] == [
        "  ...",
        "  node 127  1016 (7,15,0)   1017 (7,15,1)   1018 (7,15,2)   1019 (7,15,3)   1020 (7,15,4)   ..."
        "   1023 (7,15,7)",
    ]
    assert lines[-3:] == [
        "  tensor    [0-7] node 0 | [8-15] node 1 | [16-23] node 2 | [24-31] node 3 | ... | [1016-1023] node 127",
        "  data      [0 8 16 ... 120] nodes 0-15 | ... | [903 911 919 ... 1023] nodes 112-127",
        "  pipeline  [0 128 256 ... 896] nodes 0 16 32 ... 112 | ... | [127 255 383 ... 1023] nodes 15 31 47 ... 127",
    ]


@each("sizes", [(8,) * 128, (1024,), (1,) * 1024, (1000, 24)], ids=lambda sizes: str(len(sizes)))
@each("degrees", [(8, 16, 8), (1, 1024, 1), (1, 1, 1024), (1024, 1, 1), (2, 512, 1)], ids=str)
def test_no_picture_is_too_large(degrees: tuple[int, int, int], sizes: tuple[int, ...]) -> None:
    tp, dp, pp = degrees
    lines = draw_layout(Topology(tp=tp, dp=dp, pp=pp), Nodes(sizes))
    assert 6 <= len(lines) <= 22
    assert max(map(len, lines)) <= 120
