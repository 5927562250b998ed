"""The phases of `gpu_examination.py`, which starts each in a process of its own.

    python benchmarks/gpu_phases.py PHASE '{"option": ...}' --device cuda|cpu --output FOUND.json

A phase writes its findings to FOUND.json, more than once where it goes on after a failure, and ends with an exception
where the project is at fault.  On a CPU models have toy sizes, and a figure that a CPU cannot give is recorded as
"needs a GPU".
"""

import argparse
import contextlib
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from gpu_examination import NEEDS_GPU
from jobs import Place
from plain_gpt import CLIP, adamw, plain_gpt
from run_all import slug
from steps import LR, Steps, configuration_of
from stopwatch import Stopwatch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megazero.comm import startup
from megazero.comm.interface import Communicator
from megazero.comm.process_group import ProcessGroupCommunicator
from megazero.config import derived
from megazero.config.run import RunConfig
from megazero.memory.lease import Scratch
from megazero.memory.ledger import Ledger
from megazero.parallel.launch import Launch
from megazero.report.metrics import flops_per_token, peak_tflops
from megazero.train.step import StepControls, training_step

ROOT = Path(__file__).resolve().parents[1]
SHARED_GPU = Path(__file__).resolve().with_name("shared_gpu.py")
GIB = 1 << 30
_TOY = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --vocab-size 512"
_SMALL = "--num-layers 3 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 1000"
_SMALL_BATCH = "--micro-batch-size 4 --global-batch-size 8"


class Wrong(Exception):
    """Raised when the project has computed a wrong result, or one of its programs has failed."""


@dataclass(frozen=True)
class Bench:
    """The device on which a phase computes, and the file (`output`) to which it writes its findings as JSON."""

    device: torch.device
    output: Path

    @property
    def has_gpu(self) -> bool:
        return self.device.type == "cuda"

    def save(self, found: Mapping[str, Any]) -> None:
        """Write the findings so far, so that they are kept even if this process fails later."""
        self.output.write_text(json.dumps(found), encoding="utf-8")

    def wait(self) -> None:
        if self.has_gpu:
            torch.cuda.synchronize()


def environment(bench: Bench) -> dict[str, Any]:
    """Return versions of Python and packages, and with a GPU those of its libraries and nvidia-smi's output."""
    found: dict[str, Any] = {"python": sys.version, "packages": {}}
    for name in ("torch", "numpy", "triton", "pydantic", "safetensors", "sentencepiece", "tokenizers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found["packages"][name] = metadata.version(name)
    if not bench.has_gpu:
        return {**found, "driver": NEEDS_GPU}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found["driver"] = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20).stdout
    return {**found, "cudnn": torch.backends.cudnn.version(), "nccl": torch.cuda.nccl.version()}


def ceilings(bench: Bench) -> dict[str, Any]:
    """Measure the most that this GPU can do with the shapes of two sizes of GPT-2: products, a copy, attention."""
    stopwatch, products = Stopwatch(bench.device, at_least=10), {}
    shapes = ((8192, 8192, 8192), (65536, 768, 2304), (65536, 768, 3072), (65536, 3072, 768), (768, 65536, 3072))
    for rows, inner, columns in (*shapes, (5376, 768, 50304), (16384, 1600, 6400), (1600, 16384, 6400)):
        a = torch.randn(rows, inner, device=bench.device, dtype=torch.bfloat16)
        b = torch.randn(columns, inner, device=bench.device, dtype=torch.bfloat16).t()
        seconds = stopwatch.best(lambda a=a, b=b: a @ b)
        products[f"{rows} x {inner} x {columns}"] = round(2e-12 * rows * inner * columns / seconds, 1)
    products_of_8_bits = {}
    one = torch.ones((), device=bench.device)
    of_8_bits = ((8192, 8192, 8192), (16384, 1600, 4800), (16384, 1600, 6400), (16384, 6400, 1600))
    for rows, inner, columns in (*of_8_bits, (16384, 1600, 1600), (6400, 16384, 1600)):
        a = torch.randn(rows, inner, device=bench.device).to(torch.float8_e4m3fn)
        b = torch.randn(columns, inner, device=bench.device).to(torch.float8_e4m3fn).t()
        for is_fast in (True, False):
            seconds = stopwatch.best(
                lambda a=a, b=b, is_fast=is_fast: torch._scaled_mm(
                    a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=is_fast
                )
            )
            name = f"{rows} x {inner} x {columns}, {'fast' if is_fast else 'exact'} sums"
            products_of_8_bits[name] = round(2e-12 * rows * inner * columns / seconds, 1)
    source = torch.randn(GIB, device=bench.device)
    target = torch.empty_like(source)
    copied = round(2e-12 * source.nbytes / stopwatch.best(lambda: target.copy_(source)), 3)
    query = torch.randn(64, 12, 1024, 64, device=bench.device, dtype=torch.bfloat16, requires_grad=True)
    attention = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):

        def both(backend: SDPBackend = backend) -> None:
            with sdpa_kernel([backend]):
                mixed = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
            mixed.backward(torch.ones_like(mixed))

        with contextlib.suppress(RuntimeError):  # torch: "no available kernel"
            attention[backend.name] = stopwatch.best(both)
    found = {
        "tflops": products,
        "tflops_of_8_bits": products_of_8_bits,
        "copy_tb_per_second": copied,
        "attention_seconds": attention,
    }
    return {**found, "summary": f"{products} TFLOP/s, {copied} TB/s"}


@contextlib.contextmanager
def training(bench: Bench, words: Sequence[str], ledger: Any = None) -> Iterator[Steps]:
    """Yield the steps of the run that these flags make on one process."""
    config = configuration_of(words, 1)
    steps = Steps(config, Place(Launch(0, 1, 0), bench.device, lambda: None), ledger)
    try:
        yield steps
    finally:
        steps.close()


def launched(steps: Steps, number: int, lr: float = LR) -> Any:
    """Launch one step and return its report, whose figures the device may still be computing."""
    return training_step(steps.parts, steps.batch(number), StepControls(lr, 1.0))


def model_words(bench: Bench, preset: str, micro_batch: int) -> list[str]:
    if not bench.has_gpu:
        return [*_TOY.split(), "--micro-batch-size", "2"]
    return ["--preset", preset, "--micro-batch-size", str(micro_batch)]


def small(bench: Bench) -> list[str]:
    """Return the flags of a model and a batch that are small enough to be compared exactly."""
    return f"{_SMALL if bench.has_gpu else _TOY} {_SMALL_BATCH}".split()


def speed(
    bench: Bench,
    *,
    preset: str,
    micro_batch: int,
    compile: str = "auto",
    attention: str = "auto",
    fp8: str | None = None,
    fp8_recipe: str = "tensorwise",
    fp8_cache_weights: bool = False,
    stage: int = 0,
    compile_num_layers: int = 1,
    enable_cuda_graph: bool = False,
    micro_batches: int = 1,
    offload_optimizer: bool = False,
    profile: bool = False,
) -> dict[str, Any]:
    """Measure a training run: tokens a second, memory, places where the host waits for the device, and a profile.

    micro_batches: of a step.  offload_optimizer: all of AdamW's states are in host memory, where the update is made.
    """
    words = [*model_words(bench, preset, micro_batch), "--bf16", "--zero-stage", str(stage)]
    words += ["--compile", compile if bench.has_gpu else "off", "--attention-backend", attention]
    words += ["--fp8-format", fp8, "--fp8-recipe", fp8_recipe] if fp8 else []
    words += ["--fp8-cache-weights"] if fp8_cache_weights else []
    words += ["--compile-num-layers", str(compile_num_layers)] if compile_num_layers > 1 else []
    words += ["--enable-cuda-graph"] if enable_cuda_graph else []
    words += ["--global-batch-size", str(micro_batch * micro_batches)] if micro_batches > 1 else []
    words += ["--offload-optimizer", "cpu"] if offload_optimizer else []
    config = configuration_of(words, 1)
    began = time.perf_counter()
    with training(bench, words) as steps:
        batches = [steps.batch(number) for number in range(3)]
        controls = StepControls(LR, 1.0)
        losses = [training_step(steps.parts, batches[0], controls).loss.item()]
        found: dict[str, Any] = {"first_step_seconds": time.perf_counter() - began, "compiled": steps.core.compiled}
        warm = 3 if micro_batches == 1 else 1  # steps of several take seconds
        losses += [training_step(steps.parts, batches[number], controls).loss.item() for number in range(warm)]
        if bench.has_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()
        turns = iter(range(1 << 30))
        found |= rate(bench, lambda: training_step(steps.parts, batches[next(turns) % 3], controls), config)
        losses.append(training_step(steps.parts, batches[0], controls).loss.item())
        found["losses"] = losses
        bench.save(found)
        if not bench.has_gpu:
            found |= {"memory": NEEDS_GPU, "synchronizations": NEEDS_GPU, "profile": NEEDS_GPU}
        else:
            after = torch.cuda.memory_stats()
            found["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
            found["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 2)
            found["allocations_in_timed_steps"] = after["num_device_alloc"] - before["num_device_alloc"]
            found["synchronizations"] = synchronizations(lambda: training_step(steps.parts, batches[0], controls))
            if profile:
                found["profile"] = profiled(lambda number: training_step(steps.parts, batches[number], controls))
    if not losses[-1] < losses[0]:
        raise Wrong(f"the loss of the same few batches does not fall: {losses}")
    return found


def rate(bench: Bench, step: Callable[[], object], config: RunConfig) -> dict[str, Any]:
    """Time steps that are launched one after the other, and return their seconds and the rates of the median step."""
    number = max(12 // derived.num_micro_batches(config, 1), 4) if bench.has_gpu else 2
    began = time.perf_counter()
    if bench.has_gpu:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        host = (time.perf_counter() - began) / number
        bench.wait()
        seconds = [first.elapsed_time(second) / 1e3 for first, second in pairwise(marks)]
    else:
        clock = [began]
        for _ in range(number):
            step()
            clock.append(time.perf_counter())
        host = (clock[-1] - began) / number
        seconds = [second - first for first, second in pairwise(clock)]
    median = statistics.median(seconds)
    model = config.model
    tokens_per_second = derived.global_batch_size(config, 1) * model.seq_length / median
    flops = flops_per_token(model, vocab_size=model.vocab_size or 0)
    peak = peak_tflops(torch.cuda.get_device_name(), precision="bf16") if bench.has_gpu else None
    mfu = None if peak is None else round(tokens_per_second * flops / peak / 1e12, 4)
    return {
        "step_seconds": seconds,
        "median_step_seconds": median,
        "host_seconds_per_step": host,
        "tokens_per_second": round(tokens_per_second),
        "mfu": mfu,
        "summary": f"{tokens_per_second:.0f} tokens/s, MFU {mfu}",
    }


def synchronizations(step: Callable[[], object]) -> list[str]:
    """Return the places in a step at which the host waits for the device, each as `file.py:line`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    places = (f"{Path(w.filename).name}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message))
    return sorted(set(places))


_KINDS: Mapping[str, Sequence[str]] = {
    "products": ("gemm", "nvjet", "cutlass", "xmma"),
    "attention": ("flash", "fmha", "cudnn", "attention"),
    "triton": ("triton",),
    "adam": ("adam",),
}


def profiled(step: Callable[[int], object], number: int = 2) -> dict[str, Any]:
    """Profile steps: the device's busy share, kernels a step, milliseconds of a step by kind of kernel.

    Prints torch's table as well.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for index in range(number):
            step(index)
        torch.cuda.synchronize()
    averages = profiler.key_averages()
    print(averages.table(sort_by="self_cuda_time_total", row_limit=60))
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    if not kernels:
        return {"error": "the profiler has recorded no kernel"}
    spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    by_kind: dict[str, float] = {}
    for event in kernels:
        name = event.name.lower()
        kind = next((kind for kind, words in _KINDS.items() if any(word in name for word in words)), "other")
        by_kind[kind] = by_kind.get(kind, 0.0) + event.time_range.end - event.time_range.start
    top = sorted(averages, key=lambda row: -row.self_device_time_total)[:40]
    return {
        "busy_share": busy / (end - spans[0][0]),
        "kernels_per_step": len(kernels) / number,
        "milliseconds_by_kind": {kind: value / number / 1e3 for kind, value in by_kind.items()},
        "top": [[row.key[:110], row.count / number, row.self_device_time_total / number / 1e3] for row in top],
    }


def plain(bench: Bench, *, preset: str, micro_batch: int) -> dict[str, Any]:
    """Time the same model of torch's own modules, compiled as a whole, under autocast, for comparison with megazero."""
    config = configuration_of(model_words(bench, preset, micro_batch), 1)
    vocab_size, length = config.model.vocab_size or 0, config.model.seq_length
    torch.set_float32_matmul_precision("high")
    model = plain_gpt(config.model, 1, bench.device)
    optimizer = adamw(model, LR)
    compiled = torch.compile(model) if bench.has_gpu else model
    ids = torch.randint(vocab_size, (config.training.micro_batch_size, length + 1), device=bench.device)

    def step() -> Tensor:
        with torch.autocast(bench.device.type, torch.bfloat16):
            loss: Tensor = compiled(ids[:, :-1], ids[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    began = time.perf_counter()
    losses = [step().item()]
    found: dict[str, Any] = {"first_step_seconds": time.perf_counter() - began}
    losses += [step().item() for _ in range(3)]
    found |= rate(bench, step, config)
    if bench.has_gpu:
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
    return found | {"losses": losses}


class Precision(NamedTuple):
    """The flags of a precision, and how far from float64 on the CPU its steps may be.

    figures: of losses and gradient norms, relative.  gradients: of the direction of the last gradient.
    """

    words: str
    figures: float
    gradients: float


# The gradients of 8-bit products are 0.20 off on a CPU too (of bf16 0.03), and their figures 0.02.
PRECISIONS: Mapping[str, Precision] = {
    "fp64": Precision("--precision fp64", 1e-7, 1e-7),
    "fp32": Precision("--precision fp32", 2e-3, 2e-3),
    "fp16": Precision("--precision fp16", 2e-2, 2e-2),
    "bf16": Precision("--precision bf16", 5e-2, 5e-2),
    "fp8 tensorwise": Precision("--bf16 --fp8-format hybrid", 5e-2, 0.3),
    "fp8 delayed": Precision("--bf16 --fp8-format hybrid --fp8-recipe delayed", 5e-2, 0.3),
}
EXACT = ("--precision", "fp64", "--compile", "off")
_FP16_SCALE = 1024.0  # gradients of these small models neither overflow nor vanish


def on_cpu(bench: Bench) -> Bench:
    return Bench(torch.device("cpu"), bench.output)


def three_steps(bench: Bench, words: Sequence[str]) -> tuple[list[float], Tensor]:
    """Return the losses and gradient norms of three steps of the run, and the last gradient's direction."""
    figures = []
    with training(bench, words) as steps:
        scale = _FP16_SCALE if steps.parts.checks_overflow else 1.0
        for number in range(3):
            report = training_step(steps.parts, steps.batch(number), StepControls(1e-3, scale))
            figures += [report.loss.item(), report.grad_norm.item()]
        gradient = state_of(steps, "gradient")
    return figures, gradient / gradient.norm()


def distances(mine: tuple[list[float], Tensor], exact: tuple[list[float], Tensor]) -> dict[str, float]:
    """Return the largest relative distance of figures, and the distance of the gradients' directions."""
    return {
        "figures": float(np.max([abs(a - b) / abs(b) for a, b in zip(mine[0], exact[0], strict=True)])),
        "gradients": float((mine[1] - exact[1]).norm()),
    }


def are_close(found: Mapping[str, Any], precision: Precision) -> bool:
    """Return True if both distances are within the precision's bounds, which a NaN is not."""
    return bool(found["figures"] <= precision.figures and found["gradients"] <= precision.gradients)


def exactness(bench: Bench) -> dict[str, Any]:
    """Compare losses, gradient norms and gradients of three steps with those of float64 on the CPU."""
    exact = three_steps(on_cpu(bench), [*small(bench), *EXACT])
    wide = ("fp64", "fp32", "fp16", "bf16")
    cases = [(p, c, z) for p in wide for c in ("off", "on") for z in "03" if c == "off" or p != "fp64"]
    cases += [("bf16", "on", "1"), ("bf16", "on", "2")]
    cases += [(p, c, "0") for p in PRECISIONS if p not in wide for c in ("off", "on")]
    if not bench.has_gpu:
        cases = [(precision, "off", stage) for precision, stage in zip(PRECISIONS, "002123", strict=True)]
    found: dict[str, Any] = {}
    for precision, compiles, stage in cases:
        with kept_failures(bench, found, f"{precision}, compile {compiles}, stage {stage}") as row:
            words = [*PRECISIONS[precision].words.split(), "--compile", compiles, "--zero-stage", stage]
            mine = three_steps(bench, [*small(bench), *words])
            row |= distances(mine, exact)
            row["is_right"] = are_close(row, PRECISIONS[precision])
        torch._dynamo.reset()
    return verdict(found)


def determinism(bench: Bench) -> dict[str, Any]:
    """Compare two runs of --deterministic-mode in bf16 to the bit, each in a process of its own.

    A third run, without the mode, shows what a step takes then.
    """
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for number, words in enumerate(("--deterministic-mode", "--deterministic-mode", "")):
            output = Path(folder) / f"{number}.json"
            command = [str(Path(__file__)), "repeated", json.dumps({"words": words})]
            succeed(*command, "--device", bench.device.type, "--output", str(output))
            runs.append(json.loads(output.read_text(encoding="utf-8")))
    first, second, free = runs
    found: dict[str, Any] = {}
    for name, row in first.items():
        seconds = {"with_the_mode": row["median_step_seconds"], "without": free[name]["median_step_seconds"]}
        print(f"{name}: a step takes {seconds}")
        same = {figure: row[figure] == second[name][figure] for figure in ("losses", "states")}
        found[name] = {**seconds, "losses": row["losses"], "same": same, "is_right": all(same.values())}
    return verdict(found)


def repeated(bench: Bench, *, words: str) -> dict[str, Any]:
    """Train a small model in bf16, compiled and not; return losses, a digest of the states, seconds of a step."""
    found: dict[str, Any] = {}
    for compiles in ("off", "on") if bench.has_gpu else ("off",):
        flags = [*small(bench), "--bf16", "--compile", compiles, "--zero-stage", "2", *words.split()]
        losses, seconds = [], []
        with training(bench, flags) as steps:
            for number in range(12 if bench.has_gpu else 3):
                began = time.perf_counter()
                losses.append(launched(steps, number, lr=1e-3).loss.item())
                seconds.append(time.perf_counter() - began)
            digest = hashlib.sha256()
            for kind in ("master", "exp_avg", "exp_avg_sq"):
                digest.update(state_of(steps, kind).numpy().tobytes())
        median = statistics.median(seconds[1:])
        found[f"compile {compiles}"] = {
            "losses": losses,
            "states": digest.hexdigest(),
            "median_step_seconds": median,
        }
        torch._dynamo.reset()
    return found


# Of 50,000 elements, and buckets of which a reduction has several.
_SMALL_UNITS = f"{_TOY} --num-layers 6 --prefetch-bucket-size 400000"
_SMALL_BUCKETS = "--allgather-bucket-size 30000"
# What a case of the phase `collectives` has to call.
_CALLS: Mapping[str, tuple[str, ...]] = {
    "stage 0": ("all_reduce", "reduce_scatter_into"),
    "stage 1": ("reduce_scatter_into", "all_gather_into"),
    "stage 2": ("reduce_scatter_into", "all_gather_into"),
    "stage 3": ("reduce_scatter_into", "all_gather_into"),
    "stage 2, several buckets a message": ("reduce_scatter_coalesced", "all_gather_into"),
    "stage 3, several units a message": ("reduce_scatter_into", "all_gather_into", "all_gather_coalesced"),
}


def collectives(bench: Bench) -> dict[str, Any]:
    """Check that stages 0 to 3 give the same bits with every collective through a process group of one rank (NCCL)."""
    common = ["--bf16", "--compile", "off", "--reduce-bucket-size", "300000"]
    if bench.has_gpu:  # a kernel of attention that is chosen by time may be another one in the second run
        common += ["--attention-backend", "flash"]
    cases = {f"stage {stage}": [*small(bench), "--zero-stage", str(stage)] for stage in range(4)}
    cases["stage 2, several buckets a message"] = [*small(bench), "--zero-stage", "2", *_SMALL_BUCKETS.split()]
    cases["stage 3, several units a message"] = [*_SMALL_UNITS.split(), *_SMALL_BATCH.split(), "--zero-stage", "3"]

    def run(words: Sequence[str]) -> tuple[list[float], Tensor]:
        with training(bench, [*words, *common]) as steps:
            losses = [launched(steps, number, lr=1e-3).loss.item() for number in range(4 if bench.has_gpu else 2)]
            return losses, torch.cat([state_of(steps, kind) for kind in ("master", "exp_avg")])

    alone = {name: run(words) for name, words in cases.items()}
    device = bench.device if bench.has_gpu else None
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("nccl" if bench.has_gpu else "gloo", store=store, rank=0, world_size=1, device_id=device)
    calls: Counter[str] = Counter()
    counted = _counted_communicator(calls)

    def in_a_group(group: dist.ProcessGroup | None, scratch: Scratch) -> Communicator:
        return counted(dist.new_group([0]), scratch)

    def in_two_groups(first: object, second: object, scratch: Scratch) -> tuple[Communicator, Communicator]:
        groups = dist.new_group([0]), dist.new_group([0])
        return counted(groups[0], scratch, beside=groups[1]), counted(groups[1], scratch, beside=groups[0], lane=1)

    # Replaced, since the mesh of one rank has no process groups.
    startup._communicator, startup.data_parallel = in_a_group, in_two_groups
    found: dict[str, Any] = {}
    for name, (losses, state) in alone.items():
        with kept_failures(bench, found, name) as row:
            calls.clear()
            row["losses"], mine = run(cases[name])
            row["calls"] = dict(calls)
            row["missing"] = [call for call in _CALLS[name] if not calls[call]]
            row["is_right"] = row["losses"] == losses and torch.equal(mine, state) and not row["missing"]
    dist.destroy_process_group()
    return verdict(found)


def _counted_communicator(calls: Counter[str]) -> type[ProcessGroupCommunicator]:
    """Return the class of communicators that count their collectives in `calls`, by name."""

    def counted(name: str) -> Callable[..., object]:
        def call(self: ProcessGroupCommunicator, *words: Any, **named: Any) -> object:
            calls[name] += 1
            return getattr(ProcessGroupCommunicator, name)(self, *words, **named)

        return call

    names = {name for wanted in _CALLS.values() for name in wanted}
    return type("CountedCommunicator", (ProcessGroupCommunicator,), {name: counted(name) for name in names})


def state_of(steps: Steps, kind: str) -> Tensor:
    """Return the whole state of a kind ("gradient", "master" or a moment) in one tensor, in float64 on the CPU."""
    names = [name for name, _ in steps.core.model.named_parameters()]
    pieces = [piece.tensor.double().cpu() for name in names for piece in steps.core.engine.pieces(name, kind)]
    return torch.cat(pieces)


@contextlib.contextmanager
def kept_failures(bench: Bench, found: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yield the row of a case in `found`, and keep an exception there, so that the other cases are still tried."""
    row: dict[str, Any] = {"is_right": False}
    found[name] = row
    try:
        yield row
    except Exception as error:
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {str(error)[:400]}"
    bench.save({"cases": found})


def verdict(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a phase with cases; `main` raises an error for cases that are not right."""
    wrong = [name for name, row in found.items() if not row["is_right"]]
    return {"cases": found, "wrong": wrong, "summary": f"{len(found) - len(wrong)} of {len(found)} are right"}


def losses(bench: Bench, *, where: str) -> dict[str, Any]:
    """Train a small byte-level model on the project's own sources by pretrain_gpt.py, and return the loss curves.

    where: "cpu" or "device".  The checkpoint that one run saves is loaded by tools/generate_text.py.
    """
    runs = [("fp32", "off", "0")]
    if where == "device":
        cases = [("bf16", "auto", str(stage)) for stage in range(4)]
        more = [("bf16", "off", "0"), *cases, ("fp16", "auto", "2"), ("fp8", "auto", "0")]
        runs += more if bench.has_gpu else [("bf16", "off", "2")]
    device, curves, found = "cpu" if where == "cpu" else bench.device.type, {}, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_corpus(bench, folder)
        started = [start_training(bench, folder, device, *run) for run in runs] if bench.has_gpu else []
        for run in runs:
            title = f"{where} {run[0]}" + f" compile {run[1]} stage {run[2]}" * (run != runs[0])
            with kept_failures(bench, found, title) as row:
                process, metrics = started.pop(0) if started else start_training(bench, folder, device, *run)
                row["status"] = process.wait()
                curves[title] = losses_of(metrics)
                row["is_right"] = row["status"] == 0 and curves[title][-1] < curves[title][0]
        if (folder / "saved").exists():
            with kept_failures(bench, found, "generate") as row:
                succeed("tools/generate_text.py", "--load", str(folder / "saved"), "--prompt", "def ", "--greedy")
                row["is_right"] = True
    return {**verdict(found), "curves": curves}


def make_corpus(bench: Bench, folder: Path) -> None:
    """Make the corpus `text_text_document` in the folder, of this package's sources, a file being a document."""
    files = sorted((ROOT / "megazero").rglob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in (files if bench.has_gpu else files[:20])]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "text.jsonl").write_text(lines, encoding="utf-8")
    words = ["--input", str(folder / "text.jsonl"), "--output-prefix", str(folder / "text"), "--append-eod"]
    succeed("tools/preprocess_data.py", *words, "--tokenizer-type", "ByteTokenizer")


_RUN = (
    "--micro-batch-size 8 --global-batch-size 16 --lr 1e-3 --lr-warmup-iters 5 --seed 7 --hidden-dropout 0"
    " --attention-dropout 0 --split 95,5,0 --eval-iters 2 --tokenizer-type ByteTokenizer"
)


def start_training(
    bench: Bench, folder: Path, device: str, precision: str, compiles: str, stage: str
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start pretrain_gpt.py and return the process and its metrics file; the run in bf16 at stage 2 saves."""
    shape = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256"
    words = shape.split() if bench.has_gpu else _TOY.split()[:-2]  # the vocabulary is the corpus's
    words += _RUN.split()
    words += ["--train-iters", "60" if bench.has_gpu else "12", "--data-path", str(folder / "text_text_document")]
    metrics = folder / f"{precision}-{compiles}-{stage}.jsonl"
    words += ["--precision", "bf16", "--fp8-format", "hybrid"] if precision == "fp8" else ["--precision", precision]
    words += ["--compile", compiles, "--zero-stage", stage, "--device", device, "--metrics-file", str(metrics)]
    words += ["--cpu-threads", "4"] if bench.has_gpu and device == "cpu" else []
    words += ["--save", str(folder / "saved")] if (precision, stage) == ("bf16", "2") else []
    return subprocess.Popen([sys.executable, "pretrain_gpt.py", *words], cwd=ROOT), metrics


_LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --group-query-attention"
    " --num-query-groups 2 --untie-embeddings-and-output-weights"
)
# Settings that the other phases do not try, by name.
SETTINGS: Mapping[str, str] = {
    "the block of Llama": _LLAMA,
    "the block of Llama, stage 3, recomputed": f"{_LLAMA} --zero-stage 3 --recompute-granularity full",
    "the block of Llama, compiled": f"{_LLAMA} --compile on",
    "ALiBi, compiled": "--position-embedding-type alibi --embed-layernorm --compile on",
    "documents apart": "--reset-position-ids --reset-attention-mask",
    "documents apart, the block of Llama, compiled": f"{_LLAMA} --reset-attention-mask --compile on",
    "states in host memory": "--zero-stage 2 --offload-optimizer cpu",
    "states in host memory, updated late": "--zero-stage 2 --offload-optimizer cpu --delayed-parameter-update"
    " --delayed-parameter-update-start 3",
    "all in host memory": "--zero-stage 3 --offload-optimizer cpu --offload-param cpu",
    "all in files": "--zero-stage 3 --offload-optimizer nvme --offload-param nvme --nvme-path {folder}",
    "checkpoints in host memory": "--recompute-granularity full --checkpoint-in-cpu --contiguous-checkpointing",
    "selective recomputation": "--recompute-granularity selective",
    "deterministic": "--deterministic-mode",
    "adapters": "--lora-rank 4 --lora-random-base",
    "adapters, stage 3, compiled": "--lora-rank 4 --lora-random-base --zero-stage 3 --compile on",
    "Lion": "--optimizer lion --lr 1e-4",
    "LAMB, stage 2": "--optimizer lamb --zero-stage 2",
    "moments in 8 bits, stage 2": "--optimizer adamw8bit --zero-stage 2",
    "Lion with moments in 8 bits": "--optimizer lion8bit --lr 1e-4",
    "Adafactor, stage 3": "--optimizer adafactor --zero-stage 3",
    "a curriculum": "--curriculum-learning --curriculum-schedule fixed_linear --curriculum-min-seqlen 32"
    " --curriculum-max-seqlen 256 --curriculum-steps 6 --curriculum-seqlen-step 8",
}
EXAMPLES = ("vit.py", "zero_init.py", "lora.py")
_AT_ONCE = 10  # settings, with two processes each that share the CPU's cores


def settings(bench: Bench) -> dict[str, Any]:
    """Compare six steps of pretrain_gpt.py on the device with the same on the CPU, both in fp32, and run examples."""
    found: dict[str, Any] = {}
    names = list(SETTINGS) if bench.has_gpu else ["LAMB, stage 2"]
    if find_spec("bitsandbytes") is None:  # an extra, which a GPU machine may lack
        names = [name for name in names if "8bit" not in SETTINGS[name]]
    examples = [
        (name, subprocess.Popen([sys.executable, f"examples/{name}"], cwd=ROOT))
        for name in (EXAMPLES if bench.has_gpu else ())
    ]
    with tempfile.TemporaryDirectory() as folder:
        make_corpus(bench, Path(folder))
        for start in range(0, len(names), _AT_ONCE):
            chosen = names[start : start + _AT_ONCE]
            pairs = [[started_run(bench, Path(folder), name, where) for where in ("cpu", "device")] for name in chosen]
            for name, pair in zip(chosen, pairs, strict=True):
                with kept_failures(bench, found, name) as row:
                    row["statuses"] = [process.wait() for process, _ in pair]
                    row["losses"] = [losses_of(metrics) for _, metrics in pair]
                    row["largest_relative"] = max(abs(a - b) / a for a, b in zip(*row["losses"], strict=True))
                    row["is_right"] = not any(row["statuses"]) and row["largest_relative"] < PRECISIONS["fp32"].figures
    for name, example in examples:
        with kept_failures(bench, found, name) as row:
            row["status"] = example.wait()
            row["is_right"] = row["status"] == 0
    return verdict(found)


def started_run(bench: Bench, folder: Path, name: str, where: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a run with the settings of that name on the CPU or the device; return the process and its metrics file."""
    metrics = folder / f"{slug(name)}-{where}.jsonl"
    files = folder / f"{slug(name)}-{where}"
    files.mkdir()
    shape = "--num-layers 3 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --compile off"
    words = [*shape.split(), *_RUN.split(), "--train-iters", "6", "--data-path", str(folder / "text_text_document")]
    words += ["--precision", "fp32", "--device", "cpu" if where == "cpu" else bench.device.type]
    words += ["--metrics-file", str(metrics), *SETTINGS[name].format(folder=files).split()]
    words += ["--compile", "off"] if where == "cpu" else []
    words += ["--cpu-threads", "2"] if where == "cpu" or not bench.has_gpu else []  # sums depend on their number
    return subprocess.Popen([sys.executable, "pretrain_gpt.py", *words], cwd=ROOT), metrics


def losses_of(metrics: Path) -> list[float]:
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    records = [json.loads(line) for line in lines]
    return [record["loss"] for record in records if record.get("loss") is not None]


def succeed(*words: str) -> None:
    """Run one of the project's programs; raise Wrong if it fails."""
    status = subprocess.run([sys.executable, *words], cwd=ROOT).returncode
    if status != 0:
        raise Wrong(f"{words[0]} ended with exit status {status}")


def ledger(bench: Bench) -> dict[str, Any]:
    """Compare the ledger's peak and live bytes with the allocator's own, by kind of run."""
    base = "--num-layers 6 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --vocab-size 8000"
    full = ["--recompute-granularity", "full"]
    cases = {
        "bf16": ["--bf16"],
        "fp32, stage 3": ["--precision", "fp32", "--zero-stage", "3"],
        "full recomputation": ["--bf16", *full],
        "checkpoints in host memory": ["--bf16", *full, "--checkpoint-in-cpu"],
    }
    shape = [*(base if bench.has_gpu else _TOY).split(), *_SMALL_BATCH.split(), "--compile", "off"]

    def measure(words: Sequence[str]) -> dict[str, Any]:
        before = torch.cuda.memory_allocated() if bench.has_gpu else 0
        allocator = (lambda: torch.cuda.memory_allocated() - before) if bench.has_gpu else None
        with Ledger(bench.device, allocator=allocator) as kept, training(bench, [*shape, *words], kept) as steps:
            for number in range(2):
                kept.reset()
                if bench.has_gpu:
                    torch.cuda.reset_peak_memory_stats()
                launched(steps, number).loss.item()
            step = kept.take()
            row = {"peak": step.peak_bytes, "live": sum(kept.live_bytes().values()), "gap": step.allocator_gap}
            if not bench.has_gpu:
                return {**row, "is_right": row["peak"] >= row["live"] > 0}
            peak, live = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
            # The ledger cannot count memory that a kernel allocates and frees within itself.
            is_right = abs(row["peak"] / peak - 1) < 0.01
            return {**row, "allocator_peak": peak, "allocator_live": live, "is_right": is_right}

    measure(["--bf16"])  # makes libraries allocate their workspaces, which they keep
    found: dict[str, Any] = {}
    for name, words in cases.items():
        gc.collect()
        with kept_failures(bench, found, name) as row:
            row |= measure(words)
    return verdict(found)


GRAPHS_TEST = "tests/benchmarks/test_gpu_steps.py::test_recorded_passes_give_the_bits_of_those_that_are_launched"


def gpu_tests(bench: Bench) -> dict[str, Any]:
    """Run the project's own tests that are marked `cuda`, or on a CPU the unmarked ones of one file with such tests."""
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.cuda" in path.read_text("utf-8")]
    # Other phases do what the tests of these files do, but for one.
    marked = [path for path in marked if path.name not in ("test_gpu_steps.py", "test_gpu_examination.py")]
    # Files are named, since collecting all tests would take longer than these take to run, and packages that a GPU
    # machine may lack.
    found = [*(str(path.relative_to(ROOT)) for path in marked), GRAPHS_TEST]
    chosen = found if bench.has_gpu else ["tests/test_timers.py"]
    words = ["-q", "-p", "no:cacheprovider", "--timeout", "60", "-m", "cuda" if bench.has_gpu else "not cuda"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *chosen], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    print(done.stdout)
    summary = (done.stdout.strip().splitlines() or ["no output"])[-1]
    wrong = [] if done.returncode == 0 else [summary]
    return {"files": chosen, "wrong": wrong, "summary": summary}


VERIFY = (
    "verify-layout --mock-data --vocab-size 1000 --num-layers 4 --hidden-size 64 --num-attention-heads 4"
    " --seq-length 64 --micro-batch-size 2 --global-batch-size 16 --train-iters 10 --lr 1e-3 --compile off"
    " --verify-steps 2"
)
LAYOUTS = (
    (2, "--zero-stage 3"),
    (2, "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1"),
    (2, "--pipeline-model-parallel-size 2 --pipeline-schedule 1f1b --zero-stage 2"),
    (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble"),
)


def layouts(bench: Bench) -> dict[str, Any]:
    """Run verify-layout with several processes on one GPU, whose messages go through host memory (`shared_gpu.py`)."""
    found: dict[str, Any] = {}
    for number, layout in LAYOUTS if bench.has_gpu else LAYOUTS[:1]:
        with kept_failures(bench, found, f"{number} processes: {layout}") as row:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            processes = []
            for rank in range(number):
                told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number}
                told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
                environment = {**os.environ, **{name: str(value) for name, value in told.items()}}
                command = [sys.executable, str(SHARED_GPU), bench.device.type, *VERIFY.split(), *layout.split()]
                processes.append(subprocess.Popen(command, cwd=ROOT, env=environment))
            row["statuses"] = [process.wait() for process in processes]
            row["is_right"] = not any(row["statuses"])
    return verdict(found)


PHASES: Mapping[str, Callable[..., dict[str, Any]]] = {
    phase.__name__: phase
    for phase in (
        *(environment, ceilings, speed, plain, exactness, determinism, collectives),
        *(losses, settings, ledger, gpu_tests, layouts),
    )
}


# What a phase starts in processes of their own.
PARTS: Mapping[str, Callable[..., dict[str, Any]]] = {"repeated": repeated}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=[*PHASES, *PARTS])
    parser.add_argument("options", type=json.loads, help="keyword arguments as JSON")
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--output", type=Path, required=True, help="file for what is found")
    options = parser.parse_args(words)
    bench = Bench(torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu"), options.output)
    found: dict[str, Any] = {}
    try:
        found = {**PHASES, **PARTS}[options.phase](bench, **options.options)
        if found.get("wrong"):
            raise Wrong("; ".join(found["wrong"]))
    except Exception as error:
        traceback.print_exc()
        if not found and bench.output.exists():  # findings that were saved before the failure
            found = json.loads(bench.output.read_text(encoding="utf-8"))
        bench.save({**found, "error": f"{type(error).__name__}: {str(error)[:600]}"})
        return 1
    bench.save(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
