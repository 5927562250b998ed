"""Sampling of the next token: greedy, or drawn after temperature, top-k and top-p (nucleus) filtering.

Filters are pure functions of logits [b, V]: they set what is left out to -inf and keep at least the best token.  They
apply in the order temperature, top-k, top-p, so top-p counts the probabilities that are left after top-k.
Nucleus filtering is from Holtzman et al. 2019, section 3.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.errors import ConfigError, Problem, raise_problems


@dataclass(frozen=True)
class Sampling:
    """The settings of sampling; top_k 0 and top_p 1 filter nothing; temperature 0 is the same as greedy.

    Raises ConfigError with all values that are out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False

    def __post_init__(self) -> None:
        rules = (
            (0 <= self.temperature < float("inf"), f"--temperature {self.temperature}", "0 (greedy) or more"),
            (self.top_k >= 0, f"--top-k {self.top_k}", "0 (all tokens) or more"),
            (0 < self.top_p <= 1, f"--top-p {self.top_p}", "greater than 0, at most 1 (all tokens)"),
        )
        raise_problems(
            ConfigError,
            (
                Problem(given, "sampling must keep at least one token", legal)
                for holds, given, legal in rules
                if not holds
            ),
        )


def generator_of(seed: int, sample: int) -> torch.Generator:
    """Return the generator of random numbers for one of several continuations of a text, whatever else is drawn."""
    digest = hashlib.sha256(f"{seed} {sample}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def next_tokens(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """Choose ids [b] by logits [b, V], on the CPU.

    generators: one of the CPU for every row, which gives a number for every draw.  So devices draw alike, and a row
    draws the same whatever rows are beside it.
    """
    scores = logits.detach().to("cpu", torch.float64)
    if sampling.greedy or sampling.temperature == 0:
        return scores.argmax(dim=-1)
    scores = keep_top_p(keep_top_k(scores / sampling.temperature, sampling.top_k), sampling.top_p)
    sums = scores.softmax(dim=-1).cumsum(dim=-1)
    drawn = torch.cat([torch.rand(1, 1, dtype=torch.float64, generator=generator) for generator in generators])
    # The first id whose sum is above the drawn one; an id of probability 0 has the sum of the one before it.
    return torch.searchsorted(sums, drawn * sums[:, -1:], right=True).squeeze(1)


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Filter all but the top_k best of every row (more where the last of them is tied); nothing when top_k is 0."""
    if top_k == 0 or top_k >= logits.shape[-1]:
        return logits
    worst = logits.topk(top_k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < worst, -torch.inf)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Filter all but the smallest set of best tokens whose probabilities add up to at least top_p."""
    if top_p >= 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # the sum over better tokens
    dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= top_p)
    return logits.masked_fill(dropped, -torch.inf)
