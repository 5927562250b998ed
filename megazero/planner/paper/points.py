"""The runs of the ZeRO paper's figures 2, 3, 4, 7 and 8, as its appendix lists them (arXiv 1910.02054, tables 5 to 10).

Every one has sequences of 1,024 tokens, GPT-2's vocabulary and a micro-batch a step.  The appendix numbers the figures
as the paper's conference version does: its figures 4, 5, 6 and 7 are 6, 7, 8 and 4 here.  Table 9 lists C3 last.
"""

from types import MappingProxyType
from typing import NamedTuple


class PaperRun(NamedTuple):
    """A run: its model's size by the paper, devices, tensor-parallel size, the model's shape, and a rank's batch."""

    size: str
    devices: int
    tp: int
    layers: int
    hidden: int
    heads: int
    batch: int


FIGURE_2 = (
    PaperRun("1.5B", 400, 1, 48, 1600, 16, 24),
    PaperRun("8B", 400, 4, 72, 3072, 24, 64),
    PaperRun("40B", 400, 4, 88, 6144, 32, 12),
    PaperRun("60B", 400, 16, 132, 6144, 32, 64),
    PaperRun("80B", 400, 16, 100, 8192, 64, 32),
    PaperRun("100B", 400, 16, 125, 8192, 64, 32),
    PaperRun("120B", 400, 16, 150, 8192, 64, 24),
    PaperRun("140B", 400, 16, 175, 8192, 64, 16),
    PaperRun("170B", 400, 16, 212, 8192, 64, 12),
)
FIGURE_2_BASELINE = (
    PaperRun("1.5B", 400, 2, 48, 1600, 16, 16),
    PaperRun("8B", 400, 8, 72, 3072, 24, 8),
    PaperRun("40B", 384, 32, 88, 6144, 64, 4),
    PaperRun("60B", 384, 64, 132, 6144, 64, 4),
    PaperRun("80B", 384, 128, 100, 8192, 128, 4),
    PaperRun("100B", 384, 128, 125, 8192, 128, 2),
    PaperRun("120B", 384, 128, 150, 8192, 128, 2),
    PaperRun("140B", 384, 128, 175, 8192, 128, 2),
    PaperRun("170B", 256, 256, 212, 8192, 256, 2),
)
FIGURE_3 = (
    PaperRun("60B", 64, 16, 75, 8192, 32, 16),
    PaperRun("60B", 128, 16, 75, 8192, 32, 48),
    PaperRun("60B", 256, 16, 75, 8192, 32, 48),
    PaperRun("60B", 400, 16, 75, 8192, 32, 64),
)
FIGURE_4 = (
    PaperRun("1.5B", 128, 1, 34, 1920, 16, 24),
    PaperRun("2.5B", 128, 1, 54, 1920, 16, 24),
    PaperRun("4B", 128, 1, 64, 2304, 24, 16),
    PaperRun("6B", 128, 1, 52, 3072, 24, 12),
    PaperRun("8B", 128, 1, 72, 3072, 24, 8),
    PaperRun("10B", 128, 1, 50, 4096, 32, 6),
    PaperRun("11B", 128, 1, 54, 4096, 32, 4),
    PaperRun("12B", 128, 1, 58, 4096, 32, 4),
    PaperRun("13B", 128, 1, 62, 4096, 32, 2),
)
FIGURE_4_BASELINE = (
    PaperRun("1.16B", 128, 1, 24, 1920, 16, 8),
    PaperRun("1.38B", 128, 1, 40, 1536, 16, 1),
)
# {tensor-parallel size: (a width of the paper's models of about that size, the largest model that it measured in 32 GB
# without ZeRO and with Pos, in billions of parameters)}; the paper has neither the shapes nor the batch of table 2.
TABLE_2 = MappingProxyType(
    {
        1: (PaperRun("", 64, 1, 0, 1920, 16, 1), 1.3, 6.2),
        2: (PaperRun("", 128, 2, 0, 3072, 24, 1), 2.5, 12.5),
        4: (PaperRun("", 256, 4, 0, 4096, 32, 1), 5.0, 25.0),
        8: (PaperRun("", 512, 8, 0, 6144, 32, 1), 10.0, 50.0),
        16: (PaperRun("", 1024, 16, 0, 8192, 64, 1), 20.0, 100.0),
    }
)
# The largest models of figure 6 have this width (60B is narrower) and batch; their layers are what is looked for.
FIGURE_6 = PaperRun("", 400, 16, 0, 8192, 64, 16)
FIGURE_7_40B = PaperRun("40B", 400, 16, 50, 8192, 32, 16)
FIGURE_7_100B = PaperRun("100B", 400, 16, 125, 8192, 64, 32)
FIGURE_8_60B = MappingProxyType(
    {
        name: PaperRun("60B", 128, 16, 75, 8192, 64, batch)
        for name, batch in {"C1": 2, "C2": 4, "C3": 8, "C4": 32, "C5": 32}.items()
    }
)
FIGURE_8_170B = PaperRun("170B", 400, 16, 212, 8192, 64, 12)
TURING_NLG = PaperRun("17B", 256, 4, 78, 4256, 28, 8)
