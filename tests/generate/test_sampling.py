"""Tests filters on hand-made logits, and random draws against the probabilities they should have."""

import math
from unittest.mock import patch

import pytest
import torch
from support.each import each
from torch import Tensor

from megazero.errors import ConfigError
from megazero.generate.sampling import Sampling, generator_of, keep_top_k, keep_top_p, next_tokens

ALL = [0, 1, 2, 3]
PROBABILITIES = [0.1, 0.4, 0.2, 0.3]


def logits() -> Tensor:
    return torch.tensor([PROBABILITIES]).log() + 5.0


def kept(filtered: Tensor) -> list[int]:
    return (filtered[0] > -torch.inf).nonzero().flatten().tolist()


def frequencies(sampling: Sampling, count: int = 20_000) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    drawn = next_tokens(logits().expand(count, -1), sampling, [generator] * count)
    return (torch.bincount(drawn, minlength=4) / count).tolist()


@each(("top_k", "expected"), [(0, [0, 1, 2, 3]), (1, [1]), (2, [1, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])])
def test_top_k(top_k: int, expected: list[int]) -> None:
    assert kept(keep_top_k(logits(), top_k)) == expected


@each(
    ("top_p", "expected"),
    [(1e-9, [1]), (0.39, [1]), (0.41, [1, 3]), (0.69, [1, 3]), (0.71, [1, 2, 3]), (1.0, [0, 1, 2, 3])],
)
def test_top_p(top_p: float, expected: list[int]) -> None:
    assert kept(keep_top_p(logits(), top_p)) == expected


def test_top_p_takes_no_more_than_it_needs() -> None:
    """Two of four equal tokens reach a probability of one half exactly, so no third one is kept."""
    assert kept(keep_top_p(torch.zeros(1, 4, dtype=torch.float64), 0.5)) == [0, 1]


def test_rows_are_filtered_apart() -> None:
    rows = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    assert [(row > -torch.inf).tolist() for row in keep_top_k(rows, 1)] == [[False, False, True], [True, False, False]]
    assert [(row > -torch.inf).tolist() for row in keep_top_p(rows, 0.5)] == [
        [False, False, True],
        [True, False, False],
    ]


@each("sampling", [Sampling(greedy=True), Sampling(temperature=0), Sampling(top_k=1), Sampling(top_p=0.1)])
def test_ways_to_take_the_best(sampling: Sampling) -> None:
    assert frequencies(sampling, 50) == [0.0, 1.0, 0.0, 0.0]


def test_draws_follow_the_probabilities() -> None:
    assert frequencies(Sampling()) == pytest.approx(PROBABILITIES, abs=0.02)


def test_temperature_sharpens() -> None:
    squared = [p**2 for p in PROBABILITIES]
    expected = [p / sum(squared) for p in squared]
    assert frequencies(Sampling(temperature=0.5)) == pytest.approx(expected, abs=0.02)


def test_top_p_counts_what_top_k_has_left() -> None:
    # After top-k 3 the probabilities are 4/9, 2/9, 3/9: two tokens of these reach 0.75, three of all four do.
    assert frequencies(Sampling(top_k=3, top_p=0.75)) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.02)


def test_the_seed_fixes_the_draws() -> None:
    draws = [
        next_tokens(logits().expand(64, -1), Sampling(), [generator_of(seed, sample) for sample in range(64)])
        for seed in (3, 3, 4)
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_a_row_draws_the_same_whatever_is_beside_it() -> None:
    rows = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    together = next_tokens(rows, Sampling(top_k=20), [generator_of(1, sample) for sample in range(6)])
    alone = [next_tokens(rows[[place]], Sampling(top_k=20), [generator_of(1, place)]).item() for place in range(6)]
    assert together.tolist() == alone


def test_streams_of_other_samples_and_seeds_differ() -> None:
    firsts = [torch.rand(1, generator=generator_of(seed, sample)).item() for seed in range(8) for sample in range(8)]
    assert len(set(firsts)) == 64


def test_a_token_of_no_probability_is_never_drawn() -> None:
    """The ends of the drawn number's range stay within the tokens that are left."""
    rows = torch.full((2, 4), -torch.inf, dtype=torch.float64)
    rows[:, 1:3] = 0.0
    for drawn, expected in ((0.0, 1), (0.5, 2), (1 - 2**-53, 2)):
        with patch("torch.rand", return_value=torch.full((1, 1), drawn, dtype=torch.float64)):
            assert next_tokens(rows, Sampling(), [torch.Generator()] * 2).tolist() == [expected] * 2


def test_all_values_out_of_range_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Sampling(temperature=-1.0, top_k=-2, top_p=0.0)
    assert [problem.given for problem in caught.value.problems] == ["--temperature -1.0", "--top-k -2", "--top-p 0.0"]
    with pytest.raises(ConfigError, match="--temperature nan"):
        Sampling(temperature=math.nan)
