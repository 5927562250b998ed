"""The paper's figures 2, 3, 4, 6, 7 and 8, its table 2, and the throughput of its section 10.6, as a plan has them.

Each of the appendix's runs is run dry at two shallow depths, of which the rest is a line, and timed by the planner's
DGX-2; figures that are given the same samples run each depth of a shape once.  A V100 has 31.74 GiB of its 32 for
programs, by what PyTorch reports of it.  Attention is computed one operation at a time and nothing is compiled, as in
2020.  FLOP/s are those of the model's mathematics; the paper does not say whether it counts recomputation.

The paper's charts have no numbers: beside the points that its text gives a figure for, the paper's column is empty.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from types import MappingProxyType

from megazero.config.presets import ZERO_CONFIGS
from megazero.parallel.nodes import Nodes
from megazero.planner.advice.shallow import Measured, measure, with_layers
from megazero.planner.dry.rank import DryJob
from megazero.planner.job_plan import DryRuns
from megazero.planner.machines import MACHINES
from megazero.planner.paper import points, tables
from megazero.planner.paper.points import PaperRun
from megazero.planner.paper.rows import PaperFigure, Table
from megazero.planner.words import read_run

GB = 1e9
DGX2 = replace(MACHINES["dgx2-v100"], memory_bytes=round(31.74 * 2**30))
_TFLOPS = "TFLOP/s a device"
_VOCABULARY, _LENGTH = 50257, 1024
_BASELINE = ("--zero-stage", "0", "--recompute-granularity", "full")
# Between these numbers of layers figure 6 draws its line.
_SHALLOW, _DEEP = 40, 80
# The paper's text on its charts: TFLOP/s a device, and billions of parameters.
_OF_100B, _MEAN_8B_TO_100B, _OF_40B_BASELINE, _SPEEDUP = 38.0, 37.5, 5.0, 10.0
_MEAN_WITHOUT_MP, _OF_DDP, _LARGEST_DDP, _LARGEST_WITHOUT_MP, _OF_17B = 40.0, 20.0, 1.4, 13.0, 41.4
_LARGEST = MappingProxyType({"C1": 40.0, "C2": 60.0, "C3": 50.0, "C4": 140.0, "C5": 150.0})


def job_of(point: PaperRun, *settings: str) -> DryJob:
    """Return the job of one of the paper's runs."""
    sizes = {
        "num-layers": point.layers,
        "hidden-size": point.hidden,
        "num-attention-heads": point.heads,
        "seq-length": _LENGTH,
        "vocab-size": _VOCABULARY,
        "micro-batch-size": point.batch,
        "global-batch-size": point.batch * point.devices // point.tp,
        "tensor-model-parallel-size": point.tp,
        "train-iters": 1,
        "eval-iters": 0,
    }
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    fixed = ("--precision", "fp16", "--lr", "1e-4", "--attention-backend", "unfused", "--compile", "off")
    per_node = DGX2.devices_per_node
    across = ("--allow-tensor-parallel-across-nodes",) if point.tp > per_node else ()
    wanted = read_run([*words, *fixed, *settings, *across], Nodes((per_node,) * (point.devices // per_node)))
    return DryJob(wanted.config, wanted.vocab_size, wanted.nodes, is_gpu=True)


def zero(point: PaperRun, config: str | None = None, samples: DryRuns | None = None) -> Measured:
    """Return what ZeRO-100B takes: Pos+g and all of ZeRO-R, or a configuration of table 3.  samples: of `measure`."""
    chosen = config or (
        "C4" if point.tp > 1 else "C3"
    )  # there is nothing to cut into slices without tensor parallelism
    return measure(job_of(point, "--zero-config", chosen), DGX2, samples)


def baseline(point: PaperRun, samples: DryRuns | None = None) -> Measured:
    """Return what Megatron-LM or data parallelism without ZeRO takes."""
    return measure(job_of(point, *_BASELINE), DGX2, samples)


def tflops(found: Measured) -> float:
    return found.mfu * DGX2.peak("fp16") / 1e12


def table_2(samples: DryRuns | None = None) -> Table:
    """Return table 2: its theory, and of what it measured the largest models that fit by plans, of batch 1."""
    theory = tables.table_2()
    measured = (
        PaperFigure(
            f"MP {tp}, {name}, measured",
            largest(point, *settings, samples=samples),
            most,
            "B parameters",
            is_measured=True,
        )
        for tp, (point, without, with_pos) in points.TABLE_2.items()
        for name, settings, most in (("baseline", _BASELINE, without), ("Pos", ("--zero-config", "C1"), with_pos))
    )
    return Table(theory.title, (*theory.rows, *measured))


def figure_2(samples: DryRuns | None = None) -> Table:
    # By figure 8 the largest needs its checkpoints in host memory.
    ours = {point.size: zero(point, "C5" if point.size == "170B" else None, samples) for point in points.FIGURE_2}
    plain = {point.size: baseline(point, samples) for point in points.FIGURE_2_BASELINE}
    noted = {"100B": (_OF_100B, ">")}
    told_of_baseline = {"40B": (_OF_40B_BASELINE, "~")}
    several = [tflops(ours[size]) for size in ("8B", "40B", "60B", "80B", "100B")]
    speedups = [tflops(ours[size]) / tflops(plain[size]) for size in ours]
    rows = (
        *(_throughput(f"ZeRO {size}", found, *noted.get(size, (None, ""))) for size, found in ours.items()),
        PaperFigure("ZeRO, mean of 8B to 100B", mean(several), _MEAN_8B_TO_100B, _TFLOPS, "~", is_measured=True),
        *(_throughput(f"baseline {n}", one, *told_of_baseline.get(n, (None, ""))) for n, one in plain.items()),
        *(PaperFigure(f"speedup {size}", times, None, "times") for size, times in zip(ours, speedups, strict=True)),
        PaperFigure("largest speedup", max(speedups), _SPEEDUP, "times", "~", is_measured=True),
    )
    return Table("Figure 2: throughput of ZeRO-100B on 400 devices, and of Megatron-LM", rows)


def figure_3(samples: DryRuns | None = None) -> Table:
    found = {point.devices: zero(point, samples=samples) for point in points.FIGURE_3}
    petaflops = {devices: tflops(one) * devices / 1000 for devices, one in found.items()}
    few, many = min(found), max(found)
    ends = [point for point in points.FIGURE_3 if point.devices in (few, many)]
    batches = {point.devices: (largest_batch(point, found[point.devices], samples), point.batch) for point in ends}
    rows = (
        *(_throughput(f"{devices} devices", one) for devices, one in found.items()),
        *(PaperFigure(f"{devices} devices together", all_of, None, "PFLOP/s") for devices, all_of in petaflops.items()),
        PaperFigure(f"{many} devices by {few}", petaflops[many] / petaflops[few], many / few, "times", ">"),
        *(PaperFigure(f"largest batch, {n} devices", most, ran, "sequences") for n, (most, ran) in batches.items()),
    )
    return Table("Figure 3: superlinear scalability of 60B (75 x 8192, MP 16)", rows)


def figure_4(samples: DryRuns | None = None) -> Table:
    shared = DryRuns() if samples is None else samples
    found = {point.size: zero(point, samples=shared) for point in points.FIGURE_4}
    plain = {point.size: baseline(point, shared) for point in points.FIGURE_4_BASELINE}
    wide, alone = points.FIGURE_4[-1], points.FIGURE_4_BASELINE[-1]
    most, least = largest(wide, "--zero-config", "C3", samples=shared), largest(alone, *_BASELINE, samples=shared)
    rows = (
        *(_throughput(f"ZeRO {size}", one) for size, one in found.items()),
        PaperFigure("ZeRO, mean", mean(map(tflops, found.values())), _MEAN_WITHOUT_MP, _TFLOPS, ">", is_measured=True),
        *(
            _throughput(f"baseline {size}", one, *((_OF_DDP, "<") if size == alone.size else (None, "")))
            for size, one in plain.items()
        ),
        PaperFigure("largest with ZeRO", most, _LARGEST_WITHOUT_MP, "B parameters", "", is_measured=True),
        PaperFigure("largest without", least, _LARGEST_DDP, "B parameters", "", is_measured=True),
    )
    return Table("Figure 4: throughput without model parallelism on 128 devices", rows)


def figure_6(samples: DryRuns | None = None) -> Table:
    shared = DryRuns() if samples is None else samples
    rows = [
        PaperFigure(
            name,
            largest(points.FIGURE_6, "--zero-config", name, samples=shared),
            _LARGEST[name],
            "B parameters",
            is_measured=True,
        )
        for name in ZERO_CONFIGS
    ]
    return Table("Figure 6: the largest model (width 8192, batch 16, MP 16, 400 devices)", tuple(rows))


def figure_7(samples: DryRuns | None = None) -> Table:
    runs = [(points.FIGURE_7_40B, name) for name in ZERO_CONFIGS]
    runs += [(points.FIGURE_7_100B, name) for name in ("C4", "C5")]
    shared = DryRuns() if samples is None else samples
    found = {f"{point.size}, {name}": zero(point, name, shared).cached / GB for point, name in runs}
    rows = [PaperFigure(name, gigabytes, None, "GB") for name, gigabytes in found.items()]
    return Table("Figure 7: the most that PyTorch caches in a step", tuple(rows))


def figure_8(samples: DryRuns | None = None) -> Table:
    runs = [(point, name) for name, point in points.FIGURE_8_60B.items()]
    runs += [(points.FIGURE_8_170B, name) for name in ("C4", "C5")]
    shared = DryRuns() if samples is None else samples
    rows = [
        _throughput(f"{point.size}, {name}, batch {point.batch}", zero(point, name, shared)) for point, name in runs
    ]
    return Table("Figure 8: throughput (60B on 128 devices, 170B on 400, MP 16)", tuple(rows))


def section_10_6(samples: DryRuns | None = None) -> Table:
    found = zero(points.TURING_NLG, samples=samples)
    return Table("Section 10.6: Turing-NLG", (_throughput("17B, 256 devices, MP 4", found, _OF_17B),))


def _throughput(name: str, found: Measured, papers: float | None = None, sign: str = "") -> PaperFigure:
    """Return the row of a run's throughput, with the memory that it needs, and whether there is so much."""
    note = f"{found.total / GB:.1f} GB" + ("" if found.fits(DGX2) else ", does not fit")
    return PaperFigure(name, tflops(found), papers, _TFLOPS, sign, papers is not None, note)


def largest(point: PaperRun, *settings: str, samples: DryRuns | None = None) -> float:
    """Return the billions of parameters of the deepest model of this shape that fits: memory is a line over layers."""
    deep = measure(job_of(point._replace(layers=_DEEP), *settings), DGX2, samples)
    layers = _SHALLOW + _room([with_layers(deep, _SHALLOW).total, deep.total]) * (_DEEP - _SHALLOW)
    return int(layers) * 12 * point.hidden**2 / 1e9


def largest_batch(point: PaperRun, found: Measured, samples: DryRuns | None = None) -> int:
    """Return the largest batch of a run that fits: memory is a line over it.  found: what the run itself takes."""
    half = zero(point._replace(batch=point.batch // 2), samples=samples)
    return int(point.batch // 2 + _room([half.total, found.total]) * (point.batch - point.batch // 2))


def _room(found: Sequence[int]) -> float:
    """Return where a line through the bytes at 0 and 1 has come to the device's memory."""
    return (DGX2.memory_bytes - found[0]) / (found[1] - found[0])
