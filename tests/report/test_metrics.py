"""Tests of the formulas for FLOPs (against torch's own count), interval averages, perplexity and bits per byte."""

import math

import pytest
import torch
from support.each import each
from support.step_metrics import make_step
from torch.utils.flop_counter import FlopCounterMode

from megazero.config.model import ModelConfig
from megazero.report.metrics import Evaluation, Rates, flops_per_token, interval_metrics, matmul_parameters, peak_tflops


def gpt2_small() -> ModelConfig:
    return ModelConfig(num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1024)


def test_gpt2_small_by_hand() -> None:
    # 12 blocks of 12 x 768^2, and 50,257 rows of 768.
    assert matmul_parameters(gpt2_small(), vocab_size=50257) == 84_934_656 + 38_597_376
    assert flops_per_token(gpt2_small(), vocab_size=50257) == 6 * 123_532_032 + 113_246_208


def test_matmul_parameters_are_the_weights_of_a_torch_transformer() -> None:
    config = ModelConfig(num_layers=3, hidden_size=24, num_attention_heads=4, seq_length=16, ffn_hidden_size=40)
    block = torch.nn.TransformerEncoderLayer(24, 4, dim_feedforward=40, batch_first=True)
    weights = sum(p.numel() for name, p in block.named_parameters() if p.dim() == 2)
    assert matmul_parameters(config, vocab_size=100) == 3 * weights + 100 * 24


def test_flops_per_token_are_what_torch_counts() -> None:
    """The formula gives the FLOPs that torch counts in the matrix products of a small model, forward and backward."""
    layers, hidden, seq, vocab = 2, 16, 8, 50
    config = ModelConfig(num_layers=layers, hidden_size=hidden, num_attention_heads=1, seq_length=seq)
    x = torch.ones(seq, hidden, requires_grad=True)
    shapes = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]
    weights = [[torch.ones(shape, requires_grad=True) for shape in shapes] for _ in range(layers)]
    head = torch.ones(hidden, vocab, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        h = x
        for qkv, projection, up, down in weights:
            q, k, v = (h @ qkv).chunk(3, dim=-1)
            h = ((q @ k.T) @ v @ projection) @ up @ down
        (h @ head).sum().backward()
    assert counter.get_total_flops() == seq * flops_per_token(config, vocab_size=vocab)


@each(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("Tesla V100-SXM2-32GB", 125.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA A10", None),
        ("cpu", None),
    ],
)
def test_peaks(name: str, peak: float | None) -> None:
    assert peak_tflops(name, precision="bf16") == peak
    assert peak_tflops(name, precision="fp32") is None


def test_rates() -> None:
    rates = Rates(flops_per_token=2 * 10**9, world_size=4, device_peak_tflops=10.0)
    assert rates.tokens_per_second(5000, seconds=0.5) == 10_000
    assert rates.tflops_per_device(5000, seconds=0.5) == pytest.approx(5.0)
    assert rates.mfu(5000, seconds=0.5) == pytest.approx(0.5)
    assert Rates(flops_per_token=1, world_size=1).mfu(1, seconds=1) is None
    assert rates.tokens_per_second(5000, seconds=0.0) == 0


def test_interval_is_the_mean_of_steps_that_were_not_skipped() -> None:
    steps = [
        make_step(1, loss=4.0),
        make_step(2, loss=math.inf, skipped=True),
        make_step(3, loss=3.0, lr=5e-4),
        make_step(4, loss=2.0),
    ]
    interval = interval_metrics(steps)
    assert interval.loss == 3.0
    assert (interval.num_skipped, interval.num_nan) == (1, 1)
    assert interval.last is steps[-1]


def test_interval_rates_are_total_work_over_total_time() -> None:
    # 100 tokens in 1 s and 100 tokens in 3 s are 50 tokens/s, not the mean of 100 and 33.
    steps = [
        make_step(1, step_seconds=1.0, tokens_per_second=100.0, tflops_per_device=3.0, mfu=0.6),
        make_step(2, step_seconds=3.0, tokens_per_second=100 / 3, tflops_per_device=1.0, mfu=0.2),
    ]
    interval = interval_metrics(steps)
    assert interval.step_seconds == 2.0
    assert interval.tokens_per_second == pytest.approx(50.0)
    assert interval.tflops_per_device == pytest.approx(1.5)
    assert interval.mfu == pytest.approx(0.3)
    assert interval.eta_seconds(12) == 20.0
    assert interval.eta_seconds(1) == 0.0
    last = interval.last
    assert interval.eta_seconds(12, last.consumed_samples + 3 * last.global_batch_size) == 3 * interval.step_seconds


def test_interval_waits_add_up() -> None:
    assert (
        interval_metrics([make_step(1, data_wait_seconds=0.5), make_step(2, data_wait_seconds=0.25)]).data_wait_seconds
        == 0.75
    )


def test_interval_hides_no_nan_and_invents_no_loss() -> None:
    assert math.isnan(interval_metrics([make_step(1), make_step(2, loss=math.nan)]).loss or 0.0)
    nothing = interval_metrics([make_step(1, skipped=True)])
    assert nothing.loss is None and nothing.mfu is None


def test_evaluation() -> None:
    evaluation = Evaluation(10, 80, "validation", loss=2 * math.log(2), bytes_per_token=4.0)
    assert evaluation.perplexity == pytest.approx(4.0)
    assert evaluation.bits_per_byte == pytest.approx(0.5)
    assert Evaluation(0, 0, "test", loss=90.0).perplexity == math.exp(20)
    assert Evaluation(0, 0, "test", loss=90.0).bits_per_byte is None
    assert math.isnan(Evaluation(0, 0, "test", loss=math.nan).perplexity)
