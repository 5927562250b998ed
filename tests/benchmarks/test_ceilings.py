"""Tests of the measured ceilings of a device and of the stopwatch, at a small size."""

import time
from pathlib import Path

import pytest
import torch
from ceilings import Ceilings, float8_flops, from_json, libraries, main, mean, measure
from stopwatch import Stopwatch

from megazero.zero.plan import DTYPES

CPU = torch.device("cpu")
FOUND = Ceilings("fp32", {"torch": 100.0, "oneDNN": 300.0}, 50.0, 16)


def test_the_roofline() -> None:
    assert FOUND.flops == 300.0
    assert FOUND.seconds(600, 50) == 2.0  # bound by operations
    assert FOUND.seconds(600, 150) == 3.0  # bound by bytes
    assert FOUND.seconds(0, 25) == 0.5


def test_the_mean_of_processes() -> None:
    other = Ceilings("fp32", {"torch": 300.0, "oneDNN": 100.0}, 70.0, 16)
    assert mean([FOUND, other]) == Ceilings("fp32", {"torch": 200.0, "oneDNN": 200.0}, 60.0, 16)


def test_what_is_kept_and_said() -> None:
    assert FOUND.to_json() == {
        "precision": "fp32",
        "matmul": {"torch": 100.0, "oneDNN": 300.0},
        "copy": 50.0,
        "rows": 16,
        "flops": 300.0,
    }
    assert from_json(FOUND.to_json()) == FOUND
    text = Ceilings("bf16", {"torch": 7.9e14}, 4.2e12, 8192).describe()
    assert text == "product of 8192 x 8192 matrices in bf16: torch 790 TFLOP/s; copy: 4200 GB/s, read and written"


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_a_measurement(precision: str) -> None:
    found = measure(CPU, precision, rows=32, copied=1 << 16, budget=0.0)
    assert found.precision == precision and found.rows == 32 and found.copy > 0
    assert set(found.matmul) == set(libraries(CPU, DTYPES[precision]))
    assert all(flops > 0 for flops in found.matmul.values())


def test_who_computes_products() -> None:
    assert list(libraries(CPU, torch.float64)) == ["torch"]
    x, weight, bias = torch.randn(5, 7), torch.randn(3, 7), torch.randn(3)
    for products in libraries(CPU, torch.float32).values():
        expected = x.double() @ weight.double().t() + bias.double()
        torch.testing.assert_close(products.output(x, weight, bias).double(), expected, rtol=1e-5, atol=1e-5)


def test_8_bit_products_have_a_ceiling() -> None:
    assert float8_flops(CPU, rows=32, budget=0.0) > 0


def test_a_stopwatch_calls_as_often_as_it_may() -> None:
    calls = []

    def call() -> None:
        calls.append(time.perf_counter())
        time.sleep(0.01)

    seconds = Stopwatch(CPU, budget=0.0, at_least=3).seconds(call)
    assert len(seconds) == 3 and len(calls) == 5
    assert min(seconds) >= 0.01 and Stopwatch(CPU, budget=0.0).best(call) >= 0.01
    assert len(Stopwatch(CPU, budget=1e9, at_most=4).seconds(call)) == 4


@pytest.mark.gloo
def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["ceilings.py"])
    assert main(["--device", "cpu", "--output", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert capsys.readouterr().out == page
    products, copies = (part.splitlines()[2:] for part in page.split("\n\n") if part.startswith("|"))
    assert len(products) == len(libraries(CPU, torch.float32)) and len(copies) == 1
