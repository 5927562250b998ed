"""Tests of the benchmark of kernels against their rooflines: operations, bytes and memory, and the program, small."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import kernel_cases
import kernels
import pytest
import torch
from ceilings import Ceilings, libraries
from kernel_cases import Kernel, Sizes
from kernels import Timing, configure, main, parse_arguments, peak_bytes, sizes_of, time_kernels
from support.each import each
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megazero.tensor_parallel.float8 import float8_products
from megazero.tensor_parallel.products import TORCH

CPU = torch.device("cpu")
SIZES = Sizes(
    samples=2,
    length=24,
    hidden=32,
    heads=4,
    inner=80,
    vocabulary=120,
    padded_vocabulary=128,
    dtype=torch.float32,
    device=CPU,
)
TINY = "--num-layers 1 --hidden-size 32 --seq-length 16 --vocab-size 64 --device cpu"
ONE = Ceilings("fp32", {"torch": 1e9}, 1e9, 8)


def tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)


def by_name(sizes: Sizes = SIZES) -> dict[str, Kernel]:
    found = list(kernel_cases.kernels(sizes, {"torch": TORCH}))
    assert len({kernel.name for kernel in found}) == len(found)
    return {kernel.name: kernel for kernel in found}


def test_every_kernel_of_the_path_is_there() -> None:
    names = set(by_name())
    for layer in ("qkv", "projection", "up", "down"):
        for product in ("output", "input gradient", "weight gradient"):
            assert f"{layer}, {product} (torch)" in names
    for backend in ("torch's choice", "math", "flash"):  # a CPU has no others
        assert {f"attention, {way} ({backend})" for way in ("forward", "backward")} <= names
    for name in ("layer norm", "GELU"):
        assert {f"{name}, forward", f"{name}, backward"} <= names
    assert {"head and loss, in chunks (torch)", "head and loss, whole logits (torch)"} <= names
    assert {"GELU, backward with its bias", "query, key and value gradients into one, with its bias"} <= names
    assert {"AdamW", "gradient norm"} <= names and len(names) == 12 + 6 + 4 + 2 + 2 + 2


@each("what", ["qkv", "projection", "up", "down", "head and loss, whole"])
def test_operations_of_products_are_as_torch_counts_them(what: str) -> None:
    for name, kernel in by_name(replace(SIZES, vocabulary=128)).items():
        if name.startswith(what):
            with FlopCounterMode(display=False) as counter:
                kernel.call()
            assert counter.get_total_flops() == kernel.flops, name


def test_a_mask_spares_half_of_attentions_operations() -> None:
    kernel = by_name()["attention, forward (math)"]
    query = torch.randn(2, 4, 24, 8)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert 2 * kernel.flops == counter.get_total_flops()
    assert by_name()["attention, backward (math)"].flops == 2 * kernel.flops


def test_attention_is_the_same_by_every_backend() -> None:
    torch.manual_seed(3)
    parts = [torch.randn(2, 4, 24, 8) for _ in range(3)]
    for backend in (None, SDPBackend.FLASH_ATTENTION):
        found = kernel_cases._attend(parts, backend)
        torch.testing.assert_close(found, kernel_cases._attend(parts, SDPBackend.MATH), rtol=1e-5, atol=1e-6)


def test_chunks_and_whole_logits_have_the_same_gradients() -> None:
    found = by_name()
    chunks, whole = (found[f"head and loss, {way} (torch)"] for way in ("in chunks", "whole logits"))
    assert chunks.operands[0] is whole.operands[0]
    for ours, theirs in zip(tensors(chunks.call()), tensors(whole.call()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_bytes_are_those_of_operands_and_results() -> None:
    n, h, f, e = 48, 32, 80, 4
    found = by_name()
    assert found["up, output (torch)"].nbytes == e * (n * h + n * f + h * f)
    assert found["GELU, backward"].nbytes == 3 * e * n * f and found["layer norm, forward"].nbytes == 2 * e * n * h
    numel = 4 * h * h + 2 * h * f
    assert found["gradient norm"].nbytes == e * numel and found["AdamW"].nbytes == 7 * e * numel
    narrow = by_name(replace(SIZES, dtype=torch.bfloat16))
    assert narrow["AdamW"].nbytes == (2 + 6 * 4) * numel and narrow["gradient norm"].nbytes == 2 * numel


def test_8_bit_products_have_a_ceiling_of_their_own() -> None:
    sizes = replace(SIZES, dtype=torch.bfloat16)
    faster = replace(ONE, matmul={"float8": 4e9}, copy=1e15)
    products = {"torch": TORCH, kernels.FLOAT8: float8_products("hybrid")}
    found = {
        timing.name: timing
        for timing in time_kernels(sizes, products, {"": replace(ONE, copy=1e15), "float8": faster}, 0)
    }
    ours, theirs = (found[f"up, output ({name})"] for name in ("float8", "torch"))
    assert ours.flops == theirs.flops and ours.roofline == pytest.approx(theirs.roofline / 4)


def test_memory_beside_operands() -> None:
    x = torch.randn(1000)
    kernel = Kernel("two copies", lambda: (x + 1) * (x + 2), 0, 0, operands=(x,))
    assert peak_bytes(kernel, CPU) == 3 * 4000
    sizes = replace(SIZES, samples=16, vocabulary=8000, padded_vocabulary=8064)
    found = by_name(sizes)
    chunks, whole = (peak_bytes(found[f"head and loss, {way} (torch)"], CPU) for way in ("in chunks", "whole logits"))
    logits = 4 * sizes.tokens * sizes.padded_vocabulary
    assert whole > 2 * logits > chunks > logits  # all tokens are one chunk here, whose logits become their gradient


def test_a_timing() -> None:
    timing = Timing("x", [0.5, 0.1, 0.2], 0.05, 7, 8, 9)
    assert timing.median == 0.2 and timing.share == 0.25
    kept = timing.to_json()
    assert kept["median_step_seconds"] == 0.2 and kept["share_of_roofline"] == 0.25 and kept["peak_bytes"] == 9


def test_sizes_of_a_preset() -> None:
    config = configure(parse_arguments(["--preset", "gpt2-124m", "--precision", "bf16", "--micro-batch-size", "3"]))
    sizes = sizes_of(config, CPU)
    assert (sizes.tokens, sizes.hidden, sizes.inner, sizes.padded_vocabulary) == (3 * 1024, 768, 3072, 50304)
    assert sizes.dtype == torch.bfloat16


@pytest.mark.gloo
def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kernels.py"])
    assert main([*TINY.split(), "--time-limit", "0", "--output", str(tmp_path / "out.md")]) == 0
    page, record = (tmp_path / "out.md").read_text(), json.loads((tmp_path / "out.json").read_text())
    assert capsys.readouterr().out == page
    assert len(page.split("\n| ")[3:]) == len(record["systems"]) == 28 + 13 * (len(libraries(CPU, torch.float32)) - 1)
    assert record["model"]["name"] == "1 x 32" and record["ceilings"]["fp32"]["copy"] > 0
    for system in record["systems"].values():
        assert system["median_step_seconds"] > 0 and system["share_of_roofline"] > 0
