"""TF32 is used where it is requested and there, told once where it would pay, and never turned off or on otherwise."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import megazero
from megazero.config.engine_sections import PrecisionConfig
from megazero.errors import ConfigError
from megazero.tensor_parallel.float32 import use_tf32

CPU, GPU = torch.device("cpu"), torch.device("cuda")
EXACT, ROUNDED = PrecisionConfig(), PrecisionConfig(tf32=True)


@pytest.fixture(autouse=True)
def unchanged_process() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def capability(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")


def test_it_is_used_where_it_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    capability(monkeypatch, 9)
    (line,) = use_tf32(ROUNDED, GPU)
    assert line.startswith("--tf32: fp32 products are TF32's")
    assert torch.backends.cuda.matmul.fp32_precision == "tf32" and torch.get_float32_matmul_precision() == "high"
    assert list(use_tf32(EXACT, GPU)) == [], "the program has decided by itself, and its choice stays"
    assert torch.backends.cuda.matmul.allow_tf32


def test_products_are_exact_unless_it_is_requested() -> None:
    (line,) = use_tf32(EXACT, GPU)
    assert "full precision" in line and "--tf32" in line and "ten times" in line
    assert not torch.backends.cuda.matmul.allow_tf32
    for precision in ("bf16", "fp16", "fp64"):
        assert list(use_tf32(PrecisionConfig(precision=precision), GPU)) == []
    assert list(use_tf32(EXACT, CPU)) == []


def test_a_device_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--tf32 on a CPU"):
        list(use_tf32(ROUNDED, CPU))
    capability(monkeypatch, 7)
    with pytest.raises(ConfigError, match=r"--tf32 on a GPU \(compute capability 7.0\)"):
        list(use_tf32(ROUNDED, GPU))
    assert not torch.backends.cuda.matmul.allow_tf32


def test_the_library_takes_the_same_setting() -> None:
    with pytest.raises(ConfigError, match=r"precision.tf32 on a CPU"):
        megazero.initialize(nn.Linear(2, 2), {"precision": {"tf32": True}})
    with pytest.raises(ConfigError, match="there are no fp32 products, only bf16 ones"):
        megazero.initialize(nn.Linear(2, 2), {"precision": {"precision": "bf16", "tf32": True}})
