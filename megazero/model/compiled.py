"""Compiles a model with torch.compile, block by block.

A block, or a group of them, is compiled as a whole where nothing in it has a side effect: on one tensor-parallel rank.
Its gradients then go to autograd, and ZeRO's hooks fire block by block, or group by group.  Elsewhere a block
communicates, counts its traffic, defers gradients, or recomputes a part of itself; those are its *borders*, and the
code between two of them is compiled: attention, the activation, the additions with the norm.  The activation's output
is then made again in backward and not saved (`tensor_parallel/activation.py`); in a whole block torch's compiler
chooses what is saved, and saves it.  Neither has a graph break, and all blocks share one compilation, since they differ
in their parameters alone.  In the head, the code between its products and collectives is compiled
(`tensor_parallel/cross_entropy.py`).

On several tensor-parallel ranks a block is not one graph for two reasons.  Backward starts a collective, computes a
weight gradient, and then waits (`tensor_parallel/layers.py`); in a graph the collectives would be torch's functional
ones, and torch's compiler, not this code, would place their waits.  And every call is counted and written to the flight
record by the host when it is made (`comm/metered.py`): of a compiled call that would happen once, when it is traced,
and neither the figures of traffic nor a report of who waits for what would be true.
"""

import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from megazero.errors import ConfigError, Problem
from megazero.model.block import TransformerBlock
from megazero.model.gpt import GPT
from megazero.rules.run import compiled_under_ledger
from megazero.tensor_parallel.activation import FusedActivation
from megazero.tensor_parallel.compiler import compiled
from megazero.tensor_parallel.cross_entropy import FusedSoftmax


def compile_blocks(model: GPT, *, as_a_whole: bool, searches: bool = False) -> str:
    """Compile every block, and the head's loss, at their first use; return in words what is compiled.

    searches: on a GPU several kernels are timed for every piece of code, and the fastest is taken.
    """
    blocks = [block for block in model.layers.values() if isinstance(block, TransformerBlock)]
    if hasattr(model, "head"):
        model.head.softmax = FusedSoftmax(searches=searches)
    fused = next((FusedActivation(block.mlp.activation, searches=searches) for block in blocks), None)
    groups = list(model.groups.values())
    parts = [(module, "forward") for module in groups or blocks] if as_a_whole else []
    for block in blocks:
        block.mlp.fused = None if as_a_whole else fused
        parts += [] if as_a_whole else _between_borders(block)
    for module, method in parts:
        setattr(module, method, compiled(getattr(module, method), searches=searches))
    if as_a_whole and groups:
        return f"blocks as a whole, {len(blocks)} of them in {len(groups)} calls"
    return "every block as a whole" if as_a_whole else "the code between a block's collectives"


def parameters_of_parts(model: GPT) -> Iterator[nn.Parameter]:
    """Yield the parameters that compiled code reads where blocks are compiled in parts (`_between_borders`)."""
    for block in model.layers.values():
        if isinstance(block, TransformerBlock) and block.adds_without_effects:
            yield from block.post_attention_norm.parameters()
            biases = (block.attention.projection.bias, block.mlp.down.bias)
            yield from (bias for bias in biases if bias is not None)
        if isinstance(block, TransformerBlock) and block.attention.is_compilable:
            yield from block.attention.parameters_of_core()


def _between_borders(block: TransformerBlock) -> Iterator[tuple[nn.Module, str]]:
    """Yield the methods that only compute, without those that draw random numbers from a state of their own."""
    if block.attention.is_compilable:
        yield block.attention, "core"
    if block.adds_without_effects:
        block.leave_biases()  # as compiled code their addition is no pass of its own
        yield block, "between"
        yield block, "add"


def is_compiled(
    choice: str,
    device: torch.device,
    *,
    keeps_ledger: bool = False,
    cuts_rows: bool = False,
    on_this_machine: bool = True,
) -> bool:
    """Return True if --compile compiles: "on" and "max" do; "auto" on GPUs that have a compiler, unless forbidden.

    on_this_machine: False for a planned run, whose machines are assumed to have what the compiler needs.
    """
    is_free = device.type == "cuda" and not (keeps_ledger or cuts_rows)
    can_compile = is_free and not (on_this_machine and lacking(device))
    return choice in ("on", "max") or (choice == "auto" and can_compile)


def check_compiler(
    choice: str,
    device: torch.device,
    *,
    keeps_ledger: bool = False,
    cuts_rows: bool = False,
    records_passes: bool = False,
) -> Iterator[str]:
    """Yield notices for the user before the run begins; raises ConfigError where compilation is impossible.

    records_passes: whether the passes of compiled blocks are recorded as CUDA graphs (`model/graphs.py`).
    """
    if records_passes and device.type != "cuda":
        rule = f"CUDA graphs are of GPUs, and this run computes on the {device.type.upper()}"
        raise ConfigError(Problem("--enable-cuda-graph", rule, "--device cuda, or leave out --enable-cuda-graph"))
    if keeps_ledger:
        if choice in ("on", "max"):
            raise ConfigError(compiled_under_ledger("a kept ledger", choice))
        if choice == "auto" and device.type == "cuda":
            yield "blocks are not compiled, which costs time and memory: the ledger watches single operations"
        return
    if cuts_rows:
        if choice == "auto" and device.type == "cuda":
            yield "blocks are not compiled, which costs time and memory: a curriculum has rows of many lengths"
        return
    missing = lacking(device)
    if missing and (choice in ("on", "max") or records_passes):
        rule = f"torch.compile builds its kernels on this machine, which lacks {missing}"
        given, without = f"--compile {choice}", "--compile off"
        if records_passes:
            given, without = f"--enable-cuda-graph {given}", f"{without} without --enable-cuda-graph"
        raise ConfigError(Problem(given, rule, f"{without}, or install it"))
    if choice == "max" and device.type == "cuda":
        yield "--compile max: kernels are timed in the first step, which takes minutes"
    elif choice == "max":
        yield "--compile max: kernels are timed on GPUs only, so this is --compile on"
    if choice == "auto" and device.type == "cuda" and missing:
        yield f"blocks are not compiled, which costs time: this machine lacks {missing}"


def lacking(device: torch.device) -> str:
    """Return what torch's compiler needs and this machine doesn't have; empty where nothing is missing."""
    names = (
        (os.environ.get("CXX"), "g++", "clang++") if device.type == "cpu" else (os.environ.get("CC"), "gcc", "clang")
    )
    if not any(name and shutil.which(name) for name in names):
        return "a C++ compiler" if device.type == "cpu" else "a C compiler"
    has_headers = (Path(sysconfig.get_path("include")) / "Python.h").exists()
    return "" if has_headers else "Python's headers (Python.h)"
