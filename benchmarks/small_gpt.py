"""A small GPT of megazero for benchmarks that put an engine together by hand: options, settings and model."""

import argparse

import torch

from megazero.comm.local import LocalCommunicator
from megazero.config.model import ModelConfig
from megazero.model.gpt import GPT
from megazero.model.initial_values import initialize_
from megazero.optim.inner import AdamWSettings
from megazero.tensor_parallel.layers import TensorParallel
from megazero.tensor_parallel.random import RandomRegions

VOCABULARY = 4096
SETTINGS = AdamWSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
LR = 3e-4


def add_work(parser: argparse.ArgumentParser) -> None:
    """Add the options that set the model and the batch."""
    parser.add_argument("--num-layers", type=int, default=8, help="blocks")
    parser.add_argument("--hidden-size", type=int, default=256, help="width")
    parser.add_argument("--seq-length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--micro-batch-size", type=int, default=2, help="samples of a rank and step")


def model_config(options: argparse.Namespace) -> ModelConfig:
    return ModelConfig(
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        num_attention_heads=options.hidden_size // 64,
        seq_length=options.seq_length,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def make_model(config: ModelConfig, device: torch.device) -> GPT:
    """Make the whole model on one rank, with the first values of seed 1."""
    context = TensorParallel(LocalCommunicator(), RandomRegions(1, 0, device), torch.float32, device)
    model = GPT(config, vocab_size=VOCABULARY, tp=context, padded_vocab_size=VOCABULARY)
    initialize_(model, 1)
    return model
