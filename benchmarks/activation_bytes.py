"""Measures activation bytes of one rank by dry run, beside formulas and the paper's figures (ZeRO, sections 3.2, 6.1).

    python benchmarks/activation_bytes.py [--output FILE]

A *dry run* takes a real training step of one rank out of many on hollow tensors (`megazero plan`'s), over process
groups that send nothing, while the ledger counts bytes: it executes a run's code, but takes no memory and only seconds.
*Left for backward* are the bytes that the ledger counts as activations and activation checkpoints when forward has
ended; every storage of them is traced to the module and the operation that made it, and those to the terms of the
formula of Reducing Activation Recomputation in Large Transformer Models (Korthikanti et al.), in bytes of a layer:

    s b h (34 + 5 a s / h)      s tokens, batch b, width h, a heads; two bytes an element, one in a dropout mask

How much the attention core leaves depends on its kernel, so there are four; the first two come with a GPU's dropout:

    unfused      what the formula counts: scores, softmax, its dropout and its product, each an operation
    GPU's flash  the operation that CUDA has, on a CPU's hollow tensors; nothing of s x s
    CPU's flash  what PyTorch takes on a CPU without attention dropout; nothing of s x s
    CPU's math   what PyTorch takes on a CPU with attention dropout; in float32, whatever the model's dtype
"""

import argparse
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from report import HelpFormat, add_output, command, paragraph, publish, table, tell, today
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazero.activations.copy_stores import HostStore
from megazero.comm.metered import Meter
from megazero.comm.startup import dry_mesh
from megazero.config.run import RunConfig
from megazero.config.validate import validate
from megazero.config.values import RawValue
from megazero.data.loader import MicroBatch, StepBatch
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.ledger import Ledger
from megazero.memory.ledger_figures import Phase
from megazero.parallel.topology import Topology
from megazero.planner.dry.kernels import gpu_kernels
from megazero.planner.dry.rank import dry_tensors
from megazero.train.build import build_components, step_context
from megazero.train.step import StepControls, training_step

GB = 10**9
VOCABULARY = 50257
Kernels = Literal["unfused", "GPU's flash", "CPU's flash", "CPU's math"]


@dataclass(frozen=True)
class Case:
    """The step of one rank that a dry run takes.

    activations: settings of the section of that name.  dropout: the probability of hidden dropout and, with all
    kernels but CPU's flash, of attention dropout.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    kernels: Kernels = "GPU's flash"
    micro_batch_size: int = 32
    seq_length: int = 1024
    tp: int = 1
    dp: int = 64
    dropout: float = 0.1
    precision: str = "fp16"
    activations: Mapping[str, Any] = field(default_factory=dict)
    is_hollow: bool = True

    @property
    def sbh(self) -> int:
        return self.seq_length * self.micro_batch_size * self.hidden_size

    @property
    def assb(self) -> int:
        """The number of elements of the attention matrices of one layer."""
        return self.num_attention_heads * self.seq_length**2 * self.micro_batch_size

    def config(self) -> RunConfig:
        shape = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "precision")
        settings = {
            **{name: getattr(self, name) for name in shape},
            "vocab_size": VOCABULARY,
            "global_batch_size": self.micro_batch_size * self.dp,
            "tensor_model_parallel_size": self.tp,
            "zero_stage": 2,
            "hidden_dropout": self.dropout,
            "attention_dropout": 0.0 if self.kernels == "CPU's flash" else self.dropout,
            "train_iters": 1,
            "lr": 1e-4,
            "mock_data": True,
            **self.activations,
        }
        outcome = validate({name: RawValue(name, value, name) for name, value in settings.items()})
        assert outcome.config is not None, outcome.problems
        return outcome.config


@dataclass(frozen=True)
class Seen:
    """The bytes that a dry run counted on one rank.

    activations, checkpoints: those alive when forward has ended.  terms: the same bytes (and host memory) by term of
    the formula.  most_checkpoints: the most checkpoint bytes at any moment.  on_host: the most in host memory.
    at_peak: bytes by category at the moment when most was alive.
    """

    activations: int
    checkpoints: int
    terms: Mapping[str, int]
    most_checkpoints: int
    on_host: int
    at_peak: Mapping[str, int]

    @property
    def left(self) -> int:
        return self.activations + self.checkpoints


def dry_run(case: Case) -> Seen:
    """Take one step of rank 0 of tp x dp and return its bytes."""
    config = case.config()
    device = torch.device("cpu")
    births = Births()
    with ExitStack() as stack:
        if case.is_hollow:
            stack.enter_context(dry_tensors())
        ledger = ForwardLedger(device, births)
        for context in (ledger, births, births.in_modules(), kernels(case.kernels)):
            stack.enter_context(context)
        buffers = FusedBuffers(0, device, ledger=ledger)
        mesh = dry_mesh(Topology(tp=case.tp, dp=case.dp), 0, device, buffers, is_gpu=True, meter=Meter())
        core = build_components(config, mesh, buffers, vocab_size=VOCABULARY, ledger=ledger)
        tokens = torch.zeros(case.micro_batch_size, case.seq_length, dtype=torch.int64)
        ledger.reset()
        batch = StepBatch(0, [MicroBatch(0, tokens, tokens, None)])
        training_step(step_context(config, core), batch, StepControls(lr=1e-4, loss_scale=1.0))
        step = ledger.take()
        core.engine.close()
    recomputation = core.activations.recomputation
    copies = None if recomputation is None else recomputation.checkpoints.copies
    return Seen(
        activations=ledger.left["activations"],
        checkpoints=ledger.left["activation_checkpoints"],
        terms=ledger.terms,
        most_checkpoints=step.peaks["activation_checkpoints"],
        on_host=copies.host.peak_bytes if isinstance(copies, HostStore) else 0,
        at_peak={str(name): nbytes for name, nbytes in step.at_peak.items()},
    )


class Birth(NamedTuple):
    """The origin of a storage: the classes of the running modules, the operation, and the place in its results."""

    modules: str
    operation: str
    place: int


class Births(TorchDispatchMode):
    """A dispatch mode that records the origin of every live storage."""

    def __init__(self) -> None:
        super().__init__()
        self._modules: list[str] = []
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], Birth | None]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for place, tensor in enumerate(tree_leaves(result)):
            if isinstance(tensor, Tensor):
                self._meet(tensor.untyped_storage(), func._schema.name.removeprefix("aten::"), place)
        return result

    @contextmanager
    def in_modules(self) -> Iterator[None]:
        """Keep the list of running modules up to date within this context."""
        before = register_module_forward_pre_hook(lambda module, _: self._modules.append(type(module).__name__))
        after = register_module_forward_hook(lambda *_: self._modules.__delitem__(-1), always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def forget(self) -> None:
        """Leave the storages that are alive now out of `survivors`."""
        self._alive = {key: (ref, None) for key, (ref, _) in self._alive.items()}

    def survivors(self) -> Counter[Birth]:
        """Return the bytes of the storages that are still alive, by their birth."""
        found: Counter[Birth] = Counter()
        for ref, birth in list(self._alive.values()):
            storage = ref()
            if storage is not None and birth is not None:
                found[birth] += storage.nbytes()
        return found

    def _meet(self, storage: torch.UntypedStorage, operation: str, place: int) -> None:
        key = storage._cdata
        if key not in self._alive:
            birth = Birth("/".join(self._modules), operation, place)
            self._alive[key] = weakref.ref(storage, lambda _: self._alive.pop(key)), birth


class ForwardLedger(Ledger):
    """A ledger that keeps the bytes left when the first forward ends, by category (`left`) and by term (`terms`)."""

    def __init__(self, device: torch.device, births: Births) -> None:
        super().__init__(device)
        self._births = births
        self._has_begun = False
        self.left: Mapping[str, int] = {}
        self.terms: Mapping[str, int] = {}

    def phase(self, phase: Phase) -> None:
        super().phase(phase)
        if phase == "forward" and not self._has_begun:
            self._has_begun = True
            self._births.forget()
        elif phase == "backward" and not self.left:
            self.left = {str(name): nbytes for name, nbytes in self.live_bytes().items()}
            self.terms = by_term(self._births.survivors())


RESIDUAL, NORMED, STATISTICS = "inputs of the norms", "inputs of qkv and up", "norms: mean, 1/deviation"
CORE, SOFTMAX = "Q, K, V, the core's output", "softmax"
SOFTMAX_MASK, DROPPED = "mask of its dropout", "softmax after dropout"
CORE_EXTRA = "core: log-sum-exp, random state, causal mask"
GELU_IN, GELU_OUT, MASKS = "input of GELU", "input of down", "masks of the two dropouts"
EMBEDDING, HEAD = "embedding: ids, dropout's mask", "head: its two gradients"
COPIES, UNKNOWN = "copies of checkpoints", "unexplained"

# The storages that make up each term: modules, operation and place in the operation's results; * is any other place.
_TERMS = {
    RESIDUAL: "TransformerBlock add 0, Embedding mul 0, Embedding native_dropout 0, Embedding add 0",
    NORMED: "TransformerBlock/Norm native_layer_norm 0",
    STATISTICS: "TransformerBlock/Norm native_layer_norm *, Norm native_layer_norm *",
    CORE: "TransformerBlock/SelfAttention/ColumnParallelLinear addmm 0, TransformerBlock/SelfAttention clone 0,"
    " TransformerBlock/SelfAttention _scaled_dot_product_flash_attention 0,"
    " TransformerBlock/SelfAttention _scaled_dot_product_flash_attention_for_cpu 0",
    SOFTMAX: "TransformerBlock/SelfAttention _softmax 0, TransformerBlock/SelfAttention _safe_softmax 0",
    SOFTMAX_MASK: "TransformerBlock/SelfAttention native_dropout 1, TransformerBlock/SelfAttention empty_like 0",
    DROPPED: "TransformerBlock/SelfAttention native_dropout 0, TransformerBlock/SelfAttention mul 0",
    CORE_EXTRA: "TransformerBlock/SelfAttention _scaled_dot_product_flash_attention *,"
    " TransformerBlock/SelfAttention triu 0,"
    " TransformerBlock/SelfAttention _scaled_dot_product_flash_attention_for_cpu *",
    GELU_IN: "TransformerBlock/FeedForward/ColumnParallelLinear addmm 0",
    GELU_OUT: "TransformerBlock/FeedForward gelu 0",
    MASKS: "TransformerBlock native_dropout 1, TransformerBlock empty_like 0",
    EMBEDDING: "Embedding/VocabParallelEmbedding clamp 0, Embedding/VocabParallelEmbedding bitwise_or 0,"
    " Embedding native_dropout 1, Embedding empty_like 0",
    HEAD: "TiedHead _to_copy 0, TiedHead mm 0, TiedHead empty_like 0, nothing mul 0",  # the last one is the scaled loss
    COPIES: "nothing empty 0",
}
_TERM_OF = {birth: term for term, births in _TERMS.items() for birth in births.split(", ")}


def by_term(survivors: Mapping[Birth, int]) -> dict[str, int]:
    terms: Counter[str] = Counter()
    for birth, nbytes in survivors.items():
        made_by = f"{birth.modules or 'nothing'} {birth.operation}"
        name = _TERM_OF.get(f"{made_by} {birth.place}") or _TERM_OF.get(f"{made_by} *")
        terms[name or f"{UNKNOWN}: {made_by} {birth.place}"] += nbytes
    return dict(terms)


def kernels(which: Kernels) -> AbstractContextManager[Any]:
    """Return a context in which the model computes dropout and attention with the operations of these kernels."""
    if which in ("CPU's flash", "CPU's math"):
        return ExitStack()
    return gpu_kernels("unfused" if which == "unfused" else "flash")


def by_formula(case: Case) -> int:
    """Return the bytes that all layers leave by the formula for the case's recomputation and tensor parallelism."""
    sbh, t, kind = case.sbh, case.tp, case.activations.get("recompute_granularity", "none")
    if kind == "full":
        return 2 * sbh * case.num_layers // (t if case.activations.get("partition_activations") else 1)
    has_matrices = kind == "none" and case.kernels in ("unfused", "CPU's math")
    whole = (10 if case.dropout else 8) * sbh
    return (whole + 24 * sbh // t + (5 * case.assb // t if has_matrices else 0)) * case.num_layers


# Each term's bytes by the formula for a layer that recomputes nothing, in sbh and in assb, and where dry runs differ.
FORMULA: Mapping[str, tuple[int, int, str]] = {
    RESIDUAL: (4, 0, "2 sbh once more: the last norm's"),
    NORMED: (4, 0, ""),
    STATISTICS: (0, 0, "not in the formula; 8 bs a layer here (fp16), 16 bs on a GPU (float32)"),
    CORE: (8, 0, "CPU's math copies Q, K and V to float32: 12 + 2 sbh a layer for 8"),
    SOFTMAX: (0, 2, "float32 in CPU's math: 4 assb a layer for 2"),
    SOFTMAX_MASK: (0, 1, "CPU's math: a mask of float32, 4 assb a layer for 1"),
    DROPPED: (0, 2, "CPU's math: float32, 4 assb a layer for 2"),
    CORE_EXTRA: (0, 0, "not in the formula; flash: 4 abs a layer; unfused: ss"),
    MASKS: (2, 0, "a CPU's masks are of the activation's dtype: 4 sbh a layer for 2"),
    GELU_IN: (8, 0, ""),
    GELU_OUT: (8, 0, ""),
    EMBEDDING: (0, 0, "outside of the layers"),
    HEAD: (0, 0, "outside of the layers: made in forward; 2 sbh, and the word matrix's in float32"),
}

PAPER_GPT2 = Case(48, 1600, 25)
PAPER_100B = Case(125, 8192, 64, tp=16, dp=25)
SELECTIVE, FULL = {"recompute_granularity": "selective"}, {"recompute_granularity": "full"}
PA = {**FULL, "partition_activations": True}
PA_CPU = {**PA, "checkpoint_in_cpu": True}
ARENA = {"contiguous_checkpointing": True}

GPT2: Mapping[str, Case] = {
    "unfused": replace(PAPER_GPT2, kernels="unfused"),
    "GPU's flash": PAPER_GPT2,
    "CPU's flash": replace(PAPER_GPT2, kernels="CPU's flash"),
    "CPU's math": replace(PAPER_GPT2, kernels="CPU's math"),
    "unfused, 16 heads": replace(PAPER_GPT2, kernels="unfused", num_attention_heads=16),
    "GPU's flash, no dropout": replace(PAPER_GPT2, dropout=0.0),
    "unfused, selective": replace(PAPER_GPT2, kernels="unfused", activations=SELECTIVE),
    "CPU's math, selective": replace(PAPER_GPT2, kernels="CPU's math", activations=SELECTIVE),
    "unfused, full": replace(PAPER_GPT2, kernels="unfused", activations=FULL),
    "GPU's flash, full": replace(PAPER_GPT2, activations=FULL),
}
LARGE: Mapping[str, Case] = {
    "unfused, nothing recomputed": replace(PAPER_100B, kernels="unfused"),
    "checkpoints whole": replace(PAPER_100B, activations=FULL),
    "Pa": replace(PAPER_100B, activations=PA),
    "Pa, in one arena": replace(PAPER_100B, activations={**PA, **ARENA}),
    "Pa+cpu": replace(PAPER_100B, activations=PA_CPU),
}


def report_gpt2(seen: Mapping[str, Seen]) -> list[str]:
    rows = []
    for name, figures in seen.items():
        ends = sum(nbytes for term, nbytes in figures.terms.items() if term in (EMBEDDING, HEAD))
        peak = figures.at_peak
        at_peak = f"{gb(peak['activations'] + peak['activation_checkpoints'])} + {gb(peak['temporary'])}"
        figure = [by_formula(GPT2[name]), figures.checkpoints, figures.activations, figures.left]
        rows.append([name, *figure, gb(figures.left), ends, at_peak])
    title = ["kernels, recomputed", "formula", "checkpoints", "activations", "left", "left, GB", "ends", "peak, GB"]
    sbh, layers = PAPER_GPT2.sbh, PAPER_GPT2.num_layers
    return [
        f"## GPT-2 1.5B ({layers} x {PAPER_GPT2.hidden_size}, 25 heads, sequence 1024, batch 32, MP 1), fp16",
        f"sbh = {sbh} elements. *Formula*, a layer: sbh (34 + 5as/h) for unfused and CPU's math, 34 sbh for flash and"
        f" selective, 32 sbh for flash without dropout, 2 sbh for full. The paper's 12 sbh elements a layer are"
        f" {24 * sbh * layers} bytes, its 60 GB; by 2 sbh checkpoints are {2 * sbh * layers} bytes, where it says about"
        " 8 GB. *Ends*: the embedding's and the head's part of what is left. *Peak*: activations and checkpoints +"
        " temporaries when most was alive in the step.",
        table(title, rows),
        "Nothing recomputed, term by term, GB:",
        terms_table({name: seen[name] for name in list(seen)[:4]}),
    ]


def terms_table(seen: Mapping[str, Seen]) -> str:
    sbh, assb = PAPER_GPT2.sbh * PAPER_GPT2.num_layers, PAPER_GPT2.assb * PAPER_GPT2.num_layers
    formula = {name: sbh * linear + assb * square for name, (linear, square, _) in FORMULA.items()}
    columns = [formula, *(figures.terms for figures in seen.values())]
    unknown = sorted({name for column in columns for name in column} - set(FORMULA))
    notes = {name: note for name, (_, _, note) in FORMULA.items()}
    rows = [[name, *(gb(c.get(name, 0)) for c in columns), notes.get(name, "")] for name in [*FORMULA, *unknown]]
    rows.append(
        ["sum", *(gb(sum(column.values())) for column in columns), "of dry runs: what the ledger says, exactly"]
    )
    return table(["term", "formula", *seen, "where they differ"], rows)


def report_100b(seen: Mapping[str, Seen]) -> list[str]:
    rows = [
        [name, by_formula(LARGE[name]), figures.checkpoints, figures.most_checkpoints, figures.on_host, figures.left]
        for name, figures in seen.items()
    ]
    one, t, layers = 2 * PAPER_100B.sbh, PAPER_100B.tp, PAPER_100B.num_layers
    title = ["", "formula", "checkpoints", "most checkpoints in the step", "in host memory", "left"]
    return [
        f"## 100B ({layers} x {PAPER_100B.hidden_size}, 64 heads, sequence 1024, batch 32, MP {t}), fp16",
        f"A checkpoint is {one} bytes, a slice {one // t}, three {3 * one // t}. The paper's 33 GB, with Pa 2 GB,"
        f" count one byte an element: {layers * one // 2} and {layers * one // 2 // t}. *Formula*, a layer: unfused"
        " sbh (10 + 24/t + 5as/(ht)), checkpoints 2 sbh, with Pa 2 sbh / t.",
        table(title, rows),
    ]


def gb(nbytes: int) -> str:
    return f"{nbytes / GB:.3f}"


def timed(name: str, case: Case) -> Seen:
    start = time.perf_counter()
    seen = dry_run(case)
    tell(f"{time.perf_counter() - start:6.1f} s  {name}")
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    add_output(parser)
    output = parser.parse_args().output
    heading = (
        f"{today()}; `{command(sys.argv)}`, torch {torch.__version__}; hollow tensors, one rank of many, so that no"
        " figure depends on the machine. Bytes where nothing else is said; 1 GB = 1e9 bytes."
    )
    gpt2 = report_gpt2({name: timed(name, case) for name, case in GPT2.items()})
    large = report_100b({name: timed(name, case) for name, case in LARGE.items()})
    publish(["# Activation bytes by dry run", paragraph(heading), *gpt2, *large], output)


if __name__ == "__main__":
    main()
