"""The parts of the paper by their names, each computed when it is asked for."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

from megazero.planner.job_plan import DryRuns
from megazero.planner.paper import figures, fragments, tables
from megazero.planner.paper.rows import Table

PARTS: Mapping[str, Callable[[DryRuns], Table]] = MappingProxyType(
    {
        "figure-1": lambda _: tables.figure_1(),
        "table-1": lambda _: tables.table_1(),
        "table-2": figures.table_2,
        "table-3": lambda _: tables.table_3(),
        "section-6.3": lambda _: fragments.section_6_3(),
        "section-7": lambda _: tables.section_7(),
        "section-8": lambda _: tables.section_8(),
        "figure-2": figures.figure_2,
        "figure-3": figures.figure_3,
        "figure-4": figures.figure_4,
        "figure-6": figures.figure_6,
        "figure-7": figures.figure_7,
        "figure-8": figures.figure_8,
        "section-10.6": figures.section_10_6,
    }
)


def parts(names: Iterable[str]) -> Iterator[Table]:
    """Yield the tables of these names one after the other, each when it has been computed."""
    shared = DryRuns()
    return (PARTS[name](shared) for name in names)
