"""Tests that compiled blocks compute what the same blocks compute uncompiled, in a few graphs without breaks.

Inductor makes the code where numbers and random draws are compared. The other tests are about the graphs and about the
operations outside them, so they run the graphs as dynamo has traced them, some through AOTAutograd, without a compiler.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from support.families import FAMILIES
from support.processes import run_ranks
from support.small_runs import EOD, LENGTH, VOCAB, core_on_rank, reference_batch, tiny_run
from torch._dynamo.utils import counters

from megazero.comm.startup import make_mesh
from megazero.data.loader import MicroBatch, StepBatch
from megazero.errors import ConfigError
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.ledger import Ledger
from megazero.model.compiled import check_compiler, is_compiled, lacking
from megazero.parallel.topology import Topology
from megazero.train.build import build_components, step_context
from megazero.train.components import RunComponents
from megazero.train.step import StepControls, training_step

pytestmark = pytest.mark.gloo

WHOLE, PARTS = "every block as a whole", "the code between a block's collectives"
PIECES_OF_THE_HEAD = 3
AOT = "aot_eager"  # graphs of forward and backward without mutations, as inductor gets them: twice the time of "eager"
INDUCTOR_SECONDS = 300.0  # allows for a busy machine that has compiled nothing yet
CPU, GPU = torch.device("cpu"), torch.device("cuda")
needs_compiler = pytest.mark.skipif(bool(lacking(CPU)), reason=f"this machine lacks {lacking(CPU)}")
STEPS, MICRO_BATCHES = 3, 2
QWEN = {**FAMILIES["qwen3"], "num_query_groups": 1}


class Layout(NamedTuple):
    """A run's settings, degrees of parallelism, and the backend of torch.compile (None: inductor)."""

    settings: dict[str, Any]
    tp: int = 1
    pp: int = 1
    dp: int = 1
    backend: str | None = "eager"
    evaluates: bool = False
    within_documents: bool = False

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.dp


class Ran(NamedTuple):
    """One rank's results of some steps: figures of every step, evaluations, the last step's kept gradients, traffic.

    compiled: which parts of a block are compiled. graphs: the number of graphs of blocks.
    """

    figures: list[tuple[float, float]]
    evaluations: list[float]
    gradients: dict[str, torch.Tensor]
    traffic: dict[str, dict[str, int]]
    compiled: str | None
    graphs: int
    breaks: dict[str, int]


def off_and_on(rank: int, layout: Layout) -> tuple[Ran, Ran]:
    """Return the results of the same run uncompiled and compiled."""
    return run(rank, layout, "off"), run(rank, layout, "on")


def compiled_by(backend: str) -> AbstractContextManager[Any]:
    """Have everything that is compiled in the context use this backend of torch.compile."""
    original = torch.compile
    return patch.object(
        torch, "compile", lambda function, **options: original(function, **options | {"backend": backend})
    )


def run(rank: int, layout: Layout, choice: str) -> Ran:
    torch._dynamo.reset()
    counters.clear()
    degrees = {"tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp}
    batch = {"global_batch_size": 2 * MICRO_BATCHES * layout.dp, "compile": choice}
    config = tiny_run(**{"num_layers": 3 if layout.pp == 1 else 4, **batch, **degrees, **layout.settings})
    with nullcontext() if layout.backend is None else compiled_by(layout.backend):
        core = core_on_rank(rank, config, tp=layout.tp, pp=layout.pp, dp=layout.dp)
    parts, figures, evaluations = step_context(config, core), [], []
    for step in range(STEPS):
        core.mesh.meter.reset()
        for flat in core.engine._shards._resident_gradients.values():
            flat.fill_(torch.nan)  # so that adding to memory before it is written gives nan
        report = training_step(
            parts, batch_of(core, step, within_documents=layout.within_documents), StepControls(1e-2, 1.0)
        )
        figures.append((report.loss.item(), report.grad_norm.item()))
        traffic = core.mesh.meter.bytes_by_axis()
        if layout.evaluates:
            evaluations.append(evaluated(core))
    gradients = {
        f"{name} from {piece.start}": piece.tensor.clone()
        for name, _ in core.model.named_parameters()
        for piece in core.engine.pieces(name, "gradient")
    }
    core.engine.close()
    graphs, breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    graphs -= PIECES_OF_THE_HEAD if core.compiled is not None and hasattr(core.model, "head") else 0
    return Ran(figures, evaluations, gradients, traffic, core.compiled, graphs, breaks)


def batch_of(core: RunComponents, step: int, *, within_documents: bool = False) -> StepBatch:
    """Return this data-parallel rank's micro-batches of a step; within_documents: each has documents of its own."""
    first, data_rank = step * 2 * MICRO_BATCHES * core.mesh.topology.dp, core.mesh.coordinate("dp")
    micro_batches = []
    for index in range(MICRO_BATCHES):
        start = first + 2 * (index * core.mesh.topology.dp + data_rank)
        batch = reference_batch(start, 2, masked=False)
        documents = (batch.tokens == EOD).cumsum(dim=1) if within_documents else None
        micro_batches.append(MicroBatch(start, batch.tokens, batch.labels, None, documents=documents))
    return StepBatch(first, micro_batches)


@torch.no_grad()
def evaluated(core: RunComponents) -> float:
    """Return the loss of other samples, without dropout."""
    core.model.train(False)
    batch = reference_batch(1000, 2, masked=False)
    loss = core.model.summed_loss(batch.tokens, batch.labels).item() / (2 * LENGTH)
    core.engine.end_walk(ends_pass=True)
    core.model.train(True)
    return loss


def check_same(off: Ran, on: Ran) -> None:
    """Check that figures, gradients and traffic of the two runs are the same."""
    assert off.compiled is None and off.graphs == 0
    assert on.breaks == {}
    torch.testing.assert_close(on.figures, off.figures, rtol=1e-12, atol=0)
    torch.testing.assert_close(on.evaluations, off.evaluations, rtol=1e-12, atol=0)
    assert on.gradients.keys() == off.gradients.keys()
    for name, gradient in off.gradients.items():
        assert (on.gradients[name] - gradient).abs().max() <= 1e-12 * max(1e-3, gradient.abs().max()), name
    assert on.traffic == off.traffic


@needs_compiler
def test_inductors_code_computes_the_same() -> None:
    layout = Layout({"zero_stage": 3, "recompute_granularity": "full"}, backend=None)
    [(off, on)] = run_ranks(1, off_and_on, layout, timeout=INDUCTOR_SECONDS)
    check_same(off, on)
    assert (on.compiled, on.graphs) == (WHOLE, 1)


def test_a_cpu_compiles_nothing_unless_told() -> None:
    [ran] = run_ranks(1, run, Layout({}), "auto")
    assert ran.compiled is None and ran.graphs == 0


def test_blocks_have_a_graph_for_training_and_one_for_evaluation() -> None:
    [(off, on)] = run_ranks(1, off_and_on, Layout({"zero_stage": 3}, evaluates=True))
    check_same(off, on)
    assert len(set(on.evaluations)) == STEPS
    assert (on.compiled, on.graphs) == (WHOLE, 2)


def with_and_without_recomputation(rank: int) -> list[Ran]:
    layouts = [
        Layout({"hidden_dropout": 0.2, "attention_dropout": 0.1, **recomputing}, backend=None)
        for recomputing in ({}, {"recompute_granularity": "full"})
    ]
    return [run(rank, layouts[0], "off"), *(run(rank, layout, "on") for layout in layouts)]


@needs_compiler
def test_recomputed_dropout_is_the_same_dropout() -> None:
    [(off, kept, recomputed)] = run_ranks(1, with_and_without_recomputation, timeout=INDUCTOR_SECONDS)
    assert kept.compiled == recomputed.compiled == WHOLE
    assert recomputed.figures == kept.figures
    for name, gradient in kept.gradients.items():
        assert torch.equal(recomputed.gradients[name], gradient), name
    without = run_ranks(1, off_and_on, Layout({}))[0][0]
    for (loss, _), (other, _), (plain, _) in zip(kept.figures, off.figures, without.figures, strict=True):
        assert loss != plain and other != plain, "something is dropped"
        assert loss == pytest.approx(other, rel=0.1), "as much as elsewhere"


@pytest.mark.parametrize(
    ("layout", "compiled", "graphs"),
    [
        (
            Layout({"zero_stage": 1, "reduce_bucket_size": 300}, backend=AOT),
            WHOLE,
            1,
        ),  # a block's gradients span buckets
        (
            Layout({"zero_stage": 3, "reduce_bucket_size": 300, "compile_num_layers": 2}, dp=2),
            "blocks as a whole, 3 of them in 2 calls",
            2,  # of two blocks, and of the one that is left
        ),
        (
            Layout({"recompute_granularity": "full", "recompute_num_layers": 2, "compile_num_layers": 9}),
            "blocks as a whole, 3 of them in 2 calls",  # a segment that is recomputed is a group
            2,
        ),
        (
            Layout({}, tp=2, backend=AOT),
            PARTS,
            5,
        ),  # attention, activation and its backward, between the two, and after them
        (Layout({"sequence_parallel": True, "zero_stage": 2}, tp=2), PARTS, 5),
        (Layout({"precision": "bf16", "accumulate_allreduce_grads_in_fp32": True}, tp=2), PARTS, 5),
        (Layout({"recompute_granularity": "selective"}), PARTS, 5),
        (Layout({}, within_documents=True), WHOLE, 1),  # other masks need no other graphs
        (
            Layout({"pipeline_schedule": "zero-bubble"}, pp=2, backend=AOT),
            PARTS,
            3,
        ),  # parameters stay outside of the graphs
        (Layout(QWEN, evaluates=True), WHOLE, 2),
        (Layout(QWEN, tp=2, backend=AOT), PARTS, 5),
        (Layout({"position_embedding_type": "alibi", "embed_layernorm": True, "squared_relu": True}, tp=2), PARTS, 5),
    ],
    ids=[
        "flat gradients",
        "groups",
        "groups, recomputed",
        "tensor parallel",
        "split sequence",
        "fp32 gradients",
        "selective recomputation",
        "documents",
        "zero bubble",
        "Qwen",
        "Qwen, tensor parallel",
        "ALiBi",
    ],
)
def test_layouts(layout: Layout, compiled: str, graphs: int) -> None:
    for off, on in run_ranks(layout.size, off_and_on, layout):
        check_same(off, on)
        assert (on.compiled, on.graphs) == (compiled, graphs)


def test_what_draws_from_a_state_of_its_own_stays_outside() -> None:
    """Only the activation is compiled if the sequence is split, so that compiled runs drop what other runs drop."""
    settings = {"hidden_dropout": 0.2, "attention_dropout": 0.1, "sequence_parallel": True}
    for off, on in run_ranks(2, off_and_on, Layout(settings, tp=2)):
        check_same(off, on)
        assert (on.compiled, on.graphs) == (PARTS, 2)


def test_replicated_dropout_is_the_same_on_every_rank() -> None:
    layout = Layout({"hidden_dropout": 0.2, "attention_dropout": 0.1, "recompute_granularity": "full"}, tp=2)
    (_, first), (_, second) = run_ranks(2, off_and_on, layout)
    assert first.graphs == 4 and first.breaks == {}
    assert first.figures == second.figures
    torch.testing.assert_close(
        first.gradients["final_norm.weight from 0"], second.gradients["final_norm.weight from 0"]
    )


def additions_of_a_step(rank: int, choice: str) -> tuple[list[tuple[str, int]], set[str]]:
    """Return the calls that add several gradients at once in a step, and which of a block's have a tensor after it."""
    calls: list[tuple[str, int]] = []

    def counted(name: str, original: Any) -> Any:
        def call(slots: list[torch.Tensor], gradients: list[torch.Tensor]) -> Any:
            calls.append((name, len(slots)))
            return original(slots, gradients)

        return call

    with compiled_by(AOT):
        settings = {"zero_stage": 1, "num_layers": 2, "reduce_bucket_size": 10_000}  # a block in one bucket
        core = core_on_rank(rank, tiny_run(compile=choice, global_batch_size=4, **settings))
    with (
        patch.object(torch, "_foreach_copy_", counted("copy", torch._foreach_copy_)),
        patch.object(torch, "_foreach_add_", counted("add", torch._foreach_add_)),
    ):
        training_step(step_context(tiny_run(), core), batch_of(core, 0), StepControls(1e-2, 1.0))
    parameters = core.model.named_parameters()
    left = {name for name, one in parameters if name.startswith("layers.") and one.grad is not None}
    core.engine.close()
    return calls, left


def test_gradients_of_a_compiled_block_are_added_at_once() -> None:
    """The first micro-batch's are copied, so that nothing is zeroed for them; none is left beside the flat tensor."""
    [(calls, left)] = run_ranks(1, additions_of_a_step, "on")
    assert calls == [("copy", 12), ("copy", 12), ("add", 12), ("add", 12)]
    assert left == set()
    [(calls, left)] = run_ranks(1, additions_of_a_step, "off")
    assert calls == [] and len(left) > 0 and not any(".mlp.up.weight" in name for name in left)


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A missing compiler is an error that names it for "on", and for "auto" a notice, where its absence costs time."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    assert lacking(CPU) == "a C++ compiler" and lacking(GPU) == "a C compiler"
    for choice in ("on", "max"):
        with pytest.raises(ConfigError, match=rf"--compile {choice}\n.*lacks a C\+\+ compiler"):
            list(check_compiler(choice, CPU))
    assert list(check_compiler("auto", CPU)) == list(check_compiler("off", GPU)) == []
    assert "not compiled" in "".join(check_compiler("auto", GPU)) and not is_compiled("auto", GPU)
    with pytest.raises(ConfigError, match=r"--enable-cuda-graph --compile auto\n.*lacks a C compiler"):
        list(check_compiler("auto", GPU, records_passes=True))


def test_a_machine_without_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert lacking(CPU) in ("Python's headers (Python.h)", "a C++ compiler")
    assert is_compiled("on", CPU) and not is_compiled("auto", GPU)


def test_a_ledger_keeps_blocks_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` compiles nothing under a ledger and says so where it would have compiled; "on" is refused by name."""
    monkeypatch.setattr("megazero.model.compiled.lacking", lambda _: "")
    assert is_compiled("auto", GPU) and not is_compiled("auto", GPU, keeps_ledger=True)
    (notice,) = check_compiler("auto", GPU, keeps_ledger=True)
    assert "blocks are not compiled" in notice and "ledger" in notice
    assert list(check_compiler("off", GPU, keeps_ledger=True)) == []
    assert list(check_compiler("auto", CPU, keeps_ledger=True)) == []
    for choice in ("on", "max"):
        with pytest.raises(ConfigError, match=f"--compile {choice} with a kept ledger"):
            list(check_compiler(choice, GPU, keeps_ledger=True))


def test_what_is_built_with_a_ledger_is_not_compiled() -> None:
    config, mesh = tiny_run(compile="on"), make_mesh(Topology(), 0, CPU, FusedBuffers(0, CPU))
    with Ledger(CPU) as ledger, pytest.raises(ConfigError, match="--compile on with a kept ledger"):
        build_components(config, mesh, FusedBuffers(0, CPU), vocab_size=VOCAB, ledger=ledger)


@needs_compiler
def test_a_machine_with_all_of_it() -> None:
    assert list(check_compiler("on", CPU)) == [] and is_compiled("on", CPU) and not is_compiled("auto", CPU)


def test_passes_are_recorded_on_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megazero.model.compiled.lacking", lambda _: "")
    assert list(check_compiler("on", GPU, records_passes=True)) == []
    with pytest.raises(ConfigError, match=r"--enable-cuda-graph\n.* computes on the CPU"):
        list(check_compiler("on", CPU, records_passes=True))


def test_timed_kernels_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """--compile max is slow to start on a GPU, and times nothing on a CPU; the user is notified of either."""
    monkeypatch.setattr("megazero.model.compiled.lacking", lambda _: "")
    assert is_compiled("max", GPU) and is_compiled("max", CPU)
    assert ["takes minutes" in line for line in check_compiler("max", GPU)] == [True]
    assert ["so this is --compile on" in line for line in check_compiler("max", CPU)] == [True]
