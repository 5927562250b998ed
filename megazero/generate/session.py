"""Text from a checkpoint: the whole model on one process, whatever layout saved it.

A *session* holds the model, in evaluation mode.  It reads the *window*, the last tokens of the text so far, at most as
many as the model has positions, and starts it afresh for every token (no keys and values are kept).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megazero.comm.local import LocalCommunicator
from megazero.config.run import RunConfig
from megazero.errors import CheckpointError, Problem
from megazero.generate.sampling import Sampling, next_tokens
from megazero.model.gpt import GPT
from megazero.parallel.param_spec import StateFragment, named_specs
from megazero.tensor_parallel.layers import TensorParallel
from megazero.tensor_parallel.random import RandomRegions

WORD_EMBEDDING = "embedding.word.weight"


class SavedShape(Protocol):
    """What is known of a saved parameter."""

    @property
    def full_shape(self) -> tuple[int, ...]: ...


class Weights(Protocol):
    """Where a model's weights come from: an open checkpoint."""

    @property
    def parameters(self) -> Mapping[str, SavedShape]:
        """Every parameter by logical name."""

    def fill(self, fragments: Iterable[StateFragment]) -> None:
        """Write the saved values into the fragments, whatever layout saved them."""


class Session:
    """A model to generate with; `device` is where it computes."""

    def __init__(self, model: GPT, device: torch.device) -> None:
        self.model = model.eval()
        self.device = device

    @torch.inference_mode()
    def next_logits(self, tokens: Tensor) -> Tensor:
        """tokens [b, any length] to the logits of the token that follows, [b, V]."""
        window = tokens[:, -self.model.max_positions :].to(self.device)
        last = self.model.hidden(window)[:, -1]
        return self.model.logits(last)[:, : self.model.vocab_size]

    def generate(
        self,
        prompt: Sequence[int],
        *,
        sampling: Sampling,
        max_new_tokens: int,
        num_samples: int = 1,
        seed: int = 0,
        stop: int | None = None,
    ) -> list[list[int]]:
        """Continue `prompt` (at least one id) num_samples times; every continuation ends before its first `stop`."""
        assert prompt, "there is nothing to continue"
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([list(prompt)] * num_samples)  # [num_samples, length]
        ended = torch.zeros(num_samples, dtype=torch.bool)
        for _ in range(max_new_tokens):
            chosen = next_tokens(self.next_logits(tokens), sampling, generator)
            tokens = torch.cat((tokens, chosen.unsqueeze(1)), dim=1)
            if stop is not None:
                ended |= chosen == stop
                if ended.all():
                    break
        return [_until(row, stop) for row in tokens[:, len(prompt) :].tolist()]


def load_session(config: RunConfig, weights: Weights, device: torch.device) -> Session:
    """The model of `config` on `device`, in float32 (float64 when it was trained so), filled from `weights`.

    Raises CheckpointError when they don't fit.
    """
    dtype = torch.float64 if config.precision.precision == "fp64" else torch.float32
    vocab_size = saved_vocab_size(weights)
    tp = TensorParallel(LocalCommunicator(), RandomRegions(config.training.seed, 0, device), dtype, device)
    model = GPT(config.model, vocab_size=vocab_size, tp=tp, padded_vocab_size=vocab_size)
    weights.fill(
        StateFragment(spec, "weight", 0, spec.numel, parameter.detach().view(-1))
        for spec, parameter in named_specs(model)
    )
    return Session(model, device)


def saved_vocab_size(weights: Weights) -> int:
    """Rows of the word embedding, without padding.  Raises CheckpointError when these are no GPT's weights."""
    saved = weights.parameters.get(WORD_EMBEDDING)
    if saved is None or len(saved.full_shape) != 2:
        known = ", ".join(list(weights.parameters)[:5])
        raise CheckpointError(Problem(f"no matrix {WORD_EMBEDDING} among {known}", "the weights are those of a GPT"))
    return saved.full_shape[0]


def _until(tokens: list[int], stop: int | None) -> list[int]:
    return tokens[: tokens.index(stop)] if stop in tokens else tokens
