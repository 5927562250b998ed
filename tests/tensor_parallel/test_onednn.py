"""oneDNN's products equal float64 ones, and are chosen on the processors where they are faster."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.linear_products import SHAPES, check_products, check_shapes, operands

from megazero.tensor_parallel import onednn
from megazero.tensor_parallel.onednn import OneDnnProducts, fastest_products, is_faster
from megazero.tensor_parallel.products import TORCH

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
INTEL, AMD = "GenuineIntel", "AuthenticAMD"

needs_onednn = pytest.mark.skipif(not torch._C._has_mkldnn, reason="torch is built without oneDNN")


@needs_onednn
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape: tuple[int, int, int]) -> None:
    for given in operands(shape, torch.float32):
        check_products(OneDnnProducts(), given, 1e-6)


@needs_onednn
@pytest.mark.parametrize("rows", [5, 1, 0])
def test_shapes_without_memory(rows: int) -> None:
    check_shapes(OneDnnProducts(), rows, torch.float32)


def test_a_compiler_sees_a_product_whose_weight_may_change() -> None:
    """A compiled graph has torch's linear operator: Inductor takes the weights of oneDNN's own for constants."""
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        seen.append(graph.code)
        return graph.forward

    torch.compile(OneDnnProducts().output, backend=backend, fullgraph=True)(torch.randn(4, 7), torch.randn(3, 7), None)
    assert len(seen) == 1 and "linear(" in seen[0] and "mkldnn" not in seen[0]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Pretend to run on a machine where oneDNN is faster; tests then change one property of it."""
    monkeypatch.setattr(onednn, "_vendor", lambda: AMD)
    monkeypatch.setattr(torch._C, "has_mkl", True)
    monkeypatch.setattr(torch._C, "_has_mkldnn", True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    return monkeypatch


def test_the_machine_where_it_is_faster(machine: pytest.MonkeyPatch) -> None:
    assert is_faster(CPU, torch.float32)
    assert isinstance(fastest_products(CPU, torch.float32), OneDnnProducts)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [(CPU, torch.float64), (CPU, torch.bfloat16), (CPU, torch.float16), (CUDA, torch.float32)],
    ids=str,
)
def test_only_float32_on_the_cpu(machine: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype) -> None:
    assert not is_faster(device, dtype)
    assert fastest_products(device, dtype) is TORCH


@pytest.mark.parametrize("maker", [INTEL, ""])
def test_not_where_mkl_uses_what_there_is(machine: pytest.MonkeyPatch, maker: str) -> None:
    machine.setattr(onednn, "_vendor", lambda: maker)
    assert not is_faster(CPU, torch.float32)


@pytest.mark.parametrize("missing", ["has_mkl", "_has_mkldnn"])
def test_not_without_either_library(machine: pytest.MonkeyPatch, missing: str) -> None:
    machine.setattr(torch._C, missing, False)
    assert not is_faster(CPU, torch.float32)


@pytest.mark.parametrize("capability", ["AVX2", "DEFAULT"])
def test_not_without_wide_registers(machine: pytest.MonkeyPatch, capability: str) -> None:
    machine.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert not is_faster(CPU, torch.float32)


@pytest.mark.parametrize(
    ("text", "maker"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: x: y\nvendor_id\t: GenuineIntel\n", AMD),
        ("vendor_id\t: GenuineIntel\n", INTEL),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", ""),
        ("", ""),
    ],
)
def test_the_maker_is_the_systems_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, maker: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(onednn, "_PROCESSOR", tmp_path / "cpuinfo")
    assert onednn._vendor() == maker


def test_a_system_without_the_file_names_no_maker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(onednn, "_PROCESSOR", tmp_path / "none")
    assert onednn._vendor() == ""
