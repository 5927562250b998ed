"""Each rule about 8-bit products is broken by its own row of the table, and the values it names as legal satisfy it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.configs import make_run
from support.each import each

from megazero.rules.float8 import has_8bit_products
from megazero.rules.run import advice, check

FP8 = {"precision": "bf16", "fp8_format": "hybrid"}


@each(
    ("dims", "fits"), [((16, 32, 48), True), ((16,), True), ((16, 8), False), ((0, 16), False), ((17, 16, 16), False)]
)
def test_multiples_of_16(dims: tuple[int, ...], fits: bool) -> None:
    assert has_8bit_products(*dims) is fits


@each(
    "settings",
    [
        FP8,
        {"precision": "bf16", "fp8_format": "e4m3"},
        {**FP8, "micro_batch_size": 1},
        {**FP8, "micro_batch_size": 4, "seq_length": 12},
        {**FP8, "tensor_model_parallel_size": 2},
        {"precision": "fp16", "seq_length": 3, "hidden_size": 36},
    ],
)
def test_legal(settings: dict[str, Any]) -> None:
    assert check(make_run(**settings), 2) == ()
    assert advice(make_run(**settings), 2) == ()


@pytest.mark.parametrize("precision", ["fp64", "fp32", "fp16"])
def test_only_beside_bf16(precision: str) -> None:
    (found,) = check(make_run(precision=precision, fp8_format="e4m3"), 1)
    assert found.given == f"--fp8-format e4m3 with --precision {precision}" and found.rule
    assert found.legal == "--precision bf16, or leave out --fp8-format"


def test_a_micro_batch_of_too_odd_a_size() -> None:
    (found,) = check(make_run(**FP8, micro_batch_size=3, seq_length=24), 1)
    assert found.given == "--fp8-format hybrid with --micro-batch-size 3 --seq-length 24"
    assert found.rule.endswith("a micro-batch has 72")
    assert found.legal == "--micro-batch-size 2, --micro-batch-size 4, --seq-length 16, --seq-length 32"


def test_a_model_that_is_too_narrow() -> None:
    (found,) = check(make_run(**FP8, hidden_size=40), 1)
    assert found.given == "--fp8-format hybrid with --hidden-size 40 --tensor-model-parallel-size 1"
    assert "qkv has 40 to 120, projection has 40 to 40, up has 40 to 160, down has 160 to 40" in found.rule
    assert found.legal == "--hidden-size 32, --hidden-size 48"
    (cut,) = check(make_run(**FP8, hidden_size=48, ffn_hidden_size=120, tensor_model_parallel_size=4), 4)
    assert cut.legal == "--hidden-size 64"


def _mended(settings: dict[str, Any], legal: str) -> dict[str, Any]:
    """Return the settings with the first of the legal values in place."""
    flag, value = legal.split(",")[0].split()
    return {**settings, flag.removeprefix("--").replace("-", "_"): int(value)}


@given(
    hidden=st.integers(1, 12).map(lambda n: 12 * n),
    ffn=st.integers(1, 12).map(lambda n: 12 * n),
    degree=st.sampled_from([1, 2, 3, 6]),
    micro=st.integers(1, 9),
    length=st.integers(1, 40),
)
def test_what_is_legal_is_so(hidden: int, ffn: int, degree: int, micro: int, length: int) -> None:
    """The nearest legal values solve their problem; each layer is named in the advice or has 8-bit products."""
    settings: dict[str, Any] = {
        **FP8,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": 6,
        "tensor_model_parallel_size": degree,
        "micro_batch_size": micro,
        "seq_length": length,
    }
    before = check(make_run(**settings), degree)
    if before:
        after = check(make_run(**_mended(settings, before[0].legal)), degree)
        assert {problem.rule for problem in after} < {problem.rule for problem in before}
        return
    sizes = {
        "qkv": (hidden, 3 * hidden // degree),
        "projection": (hidden // degree, hidden),
        "up": (hidden, ffn // degree),
        "down": (ffn // degree, hidden),
    }
    left_out = [f"{name} ({i} to {o})" for name, (i, o) in sizes.items() if i % 16 or o % 16]
    lines = advice(make_run(**settings), degree)
    assert len(lines) == bool(left_out)
    assert all(text in lines[0] for text in left_out)


def test_advice_names_the_layers() -> None:
    (line,) = advice(make_run(**FP8, hidden_size=32, ffn_hidden_size=72), 1)
    assert line.startswith("--fp8-format hybrid: bf16 products remain in up (32 to 72), down (72 to 32) of every block")
