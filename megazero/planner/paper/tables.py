"""The paper's tables 1 to 3, its figure 1, and the communication of its sections 7 and 8.

Bytes of model states are those that the ledger counts at the end of a dry start-up: a model of the table's size, cut as
the table has it, on one of its devices.  Traffic is that of a dry step.  The paper's GB are 1e9 bytes; its tables round
or cut their last digits.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from megazero.config.presets import ZERO_CONFIGS
from megazero.memory.ledger_figures import CATEGORIES
from megazero.parallel.nodes import Nodes
from megazero.planner.dry.hollow import Operators
from megazero.planner.dry.rank import DryJob, RankRecord, run_rank
from megazero.planner.paper.rows import PaperFigure, Table
from megazero.planner.trace import Part
from megazero.planner.words import read_run

GB = 1e9
_STATES = ("parameters", "gradients", "master", "moments")
_HIDDEN, _LENGTH = 4096, 1024
_ONE_BUCKET = ("--reduce-bucket-size", str(1 << 41))
_SIZES = MappingProxyType({"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12})
# {ranks: {model: GB of Pos, Pos+g, Pos+g+p}}, table 1.
TABLE_1: Mapping[int, Mapping[str, tuple[float, float, float]]] = MappingProxyType(
    {
        1: {"7.5B": (120, 120, 120), "128B": (2048, 2048, 2048), "1T": (16000, 16000, 16000)},
        4: {"7.5B": (52.5, 41.3, 30), "128B": (896, 704, 512), "1T": (7000, 5500, 4000)},
        16: {"7.5B": (35.6, 21.6, 7.5), "128B": (608, 368, 128), "1T": (4750, 2875, 1000)},
        64: {"7.5B": (31.4, 16.6, 1.88), "128B": (536, 284, 32), "1T": (4187, 2218, 250)},
        256: {"7.5B": (30.4, 15.4, 0.47), "128B": (518, 263, 8), "1T": (4046, 2054, 62.5)},
        1024: {"7.5B": (30.1, 15.1, 0.12), "128B": (513, 257, 2), "1T": (4011, 2013, 15.6)},
    }
)
# {tensor-parallel size: billions of parameters in 32 GB by stage, in theory}, table 2.
TABLE_2: Mapping[int, tuple[float, float, float, float]] = MappingProxyType(
    {
        1: (2, 7.6, 14.4, 128),
        2: (4, 15.2, 28.8, 256),
        4: (8, 30.4, 57.6, 500),
        8: (16, 60.8, 115.2, 1000),
        16: (32, 121.6, 230.4, 2000),
    }
)
FIGURE_1 = MappingProxyType({0: 120.0, 1: 31.4, 2: 16.6, 3: 1.9})
_CONFIGURATIONS = MappingProxyType(
    {"C1": "Pos, CB, MD", "C2": "C1, Pa", "C3": "Pos+g, CB, MD", "C4": "C3, Pa", "C5": "C3, Pa+cpu"}
)
STAGES = MappingProxyType({0: "baseline", 1: "Pos", 2: "Pos+g", 3: "Pos+g+p"})


def figure_1() -> Table:
    return Table(
        "Figure 1: bytes of a device for 7.5B parameters on 64 devices",
        tuple(
            PaperFigure(STAGES[stage], states(7.5e9, 64, stage) / GB, papers, "GB")
            for stage, papers in FIGURE_1.items()
        ),
    )


def table_1() -> Table:
    return Table("Table 1: bytes of a device by the number of devices", tuple(_table_1(tuple(TABLE_1))))


def table_2() -> Table:
    return Table("Table 2: the largest model in 32 GB a device, data-parallel size 64", tuple(_table_2()))


def table_3() -> Table:
    return Table("Table 3: a device's peak for 100B (125 x 8192, batch 32, MP 16, 400 devices)", tuple(_table_3()))


def section_7() -> Table:
    return Table("Section 7: elements that a rank sends in a step over 64, in parameters x 63/64", tuple(_section_7()))


def section_8() -> Table:
    return Table("Section 8: elements that a block of 16 tensor-parallel ranks sends, in b s h x 15/16", _section_8())


def states(numel: float, ranks: int, stage: int, tp: int = 1, operators: Operators | None = None) -> int:
    """Return the bytes of model states of a device of tp x ranks, for a model of so many parameters.

    operators: those that other runs have found so far.
    """
    record = _run(_model_of(numel), ranks, tp, stage, ("start-up",), *_ONE_BUCKET, operators=operators)
    live = dict(zip(CATEGORIES, record.parts["start-up"].memory.timeline.live[-1].tolist(), strict=True))
    return sum(live[category] for category in _STATES)


def _model_of(numel: float) -> list[str]:
    """Return the flags of a model of so many parameters: one block, and as many rows of the vocabulary as it takes."""
    block = 12 * _HIDDEN**2 + 13 * _HIDDEN
    rows = round((numel - block - 2 * _HIDDEN) / _HIDDEN) - _LENGTH
    return [*_shape(1), "--vocab-size", str(rows)]


def _shape(layers: int) -> list[str]:
    return ["--num-layers", str(layers), "--hidden-size", str(_HIDDEN), "--num-attention-heads", "32"]


def _run(
    model: Sequence[str],
    ranks: int,
    tp: int,
    stage: int | None,
    parts: Sequence[Part],
    *more: str,
    batch: int = 1,
    operators: Operators | None = None,
) -> RankRecord:
    """Run rank 0 of tp x ranks dry through these parts; stage None: as `more` has it.  batch: a micro-batch's."""
    sizes = {
        "seq-length": _LENGTH,
        "make-vocab-size-divisible-by": 1,
        "micro-batch-size": batch,
        "global-batch-size": batch * ranks,
        "tensor-model-parallel-size": tp,
        "train-iters": 1,
        "eval-iters": 0,
        **({} if stage is None else {"zero-stage": stage}),
    }
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    fixed = ("--precision", "fp16", "--lr", "1e-4")
    wanted = read_run([*model, *words, *fixed, *more], Nodes((ranks * tp,)))
    return run_rank(DryJob(wanted.config, wanted.vocab_size, wanted.nodes, is_gpu=True), 0, parts, operators)


def _table_1(counts: Sequence[int]) -> Iterator[PaperFigure]:
    operators = Operators()
    for ranks in counts:
        for model, papers in TABLE_1[ranks].items():
            for stage, value in enumerate(papers, start=1):
                ours = states(_SIZES[model], ranks, stage, operators=operators) / GB
                yield PaperFigure(f"{model}, {STAGES[stage]}, {ranks} devices", ours, value, "GB")


def _table_2() -> Iterator[PaperFigure]:
    operators = Operators()
    for tp, theory in TABLE_2.items():
        for stage, papers in enumerate(theory):
            bytes_of_one = states(64e9, 64, stage, tp, operators) / 64e9
            yield PaperFigure(f"MP {tp}, {STAGES[stage]}", 32 / bytes_of_one, papers, "B parameters")


def _table_3(layers: int = 125) -> Iterator[PaperFigure]:
    """Yield a device's peak for 100B parameters, batch 32 and MP 16; of two dry depths, of which the rest is a line."""
    operators = Operators()
    for name in ZERO_CONFIGS:
        shallow, deep = (_peak_of(depth, name, operators) for depth in (2, 4))
        ours = shallow + (layers - 2) * (deep - shallow) / 2
        yield PaperFigure(f"{name} ({_CONFIGURATIONS[name]})", ours / GB, None, "GB")


def _peak_of(layers: int, name: str, operators: Operators) -> int:
    model = ["--num-layers", str(layers), "--hidden-size", "8192", "--num-attention-heads", "64"]
    more = ("--vocab-size", "50257", "--zero-config", name)
    record = _run(model, 25, 16, None, ("start-up", "first step", "steady step"), *more, batch=32, operators=operators)
    return record.parts["steady step"].memory.peak_bytes


def _section_7() -> Iterator[PaperFigure]:
    papers, operators = {0: 2.0, 1: 2.0, 2: 2.0, 3: 3.0}, Operators()
    for stage, value in papers.items():
        record = _run(_model_of(2e9), 64, 1, stage, ("start-up", "first step", "steady step"), operators=operators)
        sent = sum(count.nbytes for count in record.parts["steady step"].traffic["dp"].values())
        yield PaperFigure(STAGES[stage], sent / 2 / (record.numel * 63 / 64), value, "parameters")


def _section_8() -> tuple[PaperFigure, ...]:
    one = _LENGTH * _HIDDEN * 15 / 16
    operators = Operators()
    plain, pa = (_of_block(operators, *flags) for flags in ((), ("--partition-activations", "true")))
    return (
        PaperFigure("all layers recomputed", plain / 2 / one, 12.0, "b s h"),
        PaperFigure("and Pa", pa / 2 / one, 13.0, "b s h"),
    )


def _of_block(operators: Operators, *flags: str) -> int:
    """Return the bytes that one more block sends over the tensor-parallel axis in a step."""
    sent = []
    for layers in (1, 2):
        parts: tuple[Part, ...] = ("start-up", "first step")
        recomputed = ("--recompute-granularity", "full")
        record = _run(
            [*_shape(layers), "--vocab-size", "1024"], 1, 16, 0, parts, *recomputed, *flags, operators=operators
        )
        sent.append(sum(count.nbytes for count in record.parts["first step"].traffic["tp"].values()))
    return sent[1] - sent[0]
