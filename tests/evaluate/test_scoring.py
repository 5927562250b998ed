"""Tests scores in every layout against the plain reference, token by token in float64."""

from array import array
from pathlib import Path

import pytest
import torch
from support import reference
from support.checkpoints import run_config, save_checkpoint
from support.likelihoods import Likelihood, likelihood
from support.models import small_config
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor

from megazero.checkpoint.reader import open_checkpoint
from megazero.command_line.parse import from_yaml
from megazero.console import Console
from megazero.evaluate.scoring import Score, Scorer
from megazero.evaluate.windows import Request
from megazero.generate.session import load_session

VOCAB, LENGTH = 101, 12  # two tensor-parallel ranks pad the vocabulary


def request(count: int, start: int) -> Request:
    return Request(array("q", [(7 * place + count) % VOCAB for place in range(count)]), start)


# As long as the model reads, one more, several windows; a context alone; nothing but context; one token.
REQUESTS = [request(*each) for each in ((13, 1), (14, 1), (40, 1), (9, 5), (30, 28), (30, 3), (1, 1), (2, 1))]


def scorer(folder: Path, rank: int = 0, *, rows: int = 3, tp: int = 1, dp: int = 1, pp: int = 1) -> Scorer:
    checkpoint = open_checkpoint(folder)
    mesh = mesh_in_worker(rank, tp=tp, dp=dp, pp=pp)
    session = load_session(from_yaml(checkpoint.config_yaml), checkpoint, mesh)
    return Scorer(session, mesh, rows=rows, console=Console(rank))


def saved(folder: Path, **changes: object) -> dict[str, Tensor]:
    return save_checkpoint(folder, run_config(small_config(init_method_std=0.3, **changes)), vocab_size=VOCAB, tp=2)


def expected(weights: dict[str, Tensor], requests: list[Request], stride: int) -> list[Likelihood]:
    def next_logits(ids: object) -> Tensor:
        return reference.logits(weights, torch.tensor([list(ids)]))[0, -1]

    return [likelihood(next_logits, each.ids, each.start, length=LENGTH, stride=stride) for each in requests]


def with_greedy(weights: dict[str, Tensor]) -> list[Request]:
    """Return the requests and one whose three predicted ids are the most likely ones."""
    ids = [3, 5, 8]
    for _ in range(3):
        ids.append(int(reference.logits(weights, torch.tensor([ids]))[0, -1].argmax()))
    return [*REQUESTS, Request(array("q", ids), 3), Request(array("q", ids), 2)]


def check(found: list[Score], wanted: list[Likelihood]) -> None:
    assert [score.is_greedy for score in found] == [each.is_greedy for each in wanted]
    assert [score.log_likelihood for score in found] == pytest.approx([each.value for each in wanted], rel=1e-12)


@pytest.mark.parametrize("stride", [1, 5, LENGTH])
def test_scores_are_the_references(tmp_path: Path, stride: int) -> None:
    weights = saved(tmp_path)
    requests = with_greedy(weights)
    wanted = expected(weights, requests, stride)
    assert [each.is_greedy for each in wanted[-4:]] == [True, False, True, False]  # the first is of no token
    check(scorer(tmp_path).score(requests, stride=stride), wanted)
    check(scorer(tmp_path, rows=50).score(requests, stride=stride), wanted)


def test_nothing_is_certain_and_no_request_has_no_score(tmp_path: Path) -> None:
    saved(tmp_path)
    own = scorer(tmp_path)
    assert own.score([]) == [] and own.score([request(1, 1)]) == [Score(0.0, True)]


def score_on_rank(rank: int, folder: Path, requests: list[Request], tp: int, dp: int, pp: int) -> list[list[Score]]:
    own = scorer(folder, rank, tp=tp, dp=dp, pp=pp)
    return [own.score(requests, stride=stride) for stride in (5, LENGTH)]


@pytest.mark.gloo
def test_every_layout_gives_the_same_scores(tmp_path: Path) -> None:
    weights = saved(tmp_path, untie_embeddings_and_output_weights=True)
    requests = with_greedy(weights)
    wanted = [expected(weights, requests, stride) for stride in (5, LENGTH)]
    alone = score_on_rank(0, tmp_path, requests, 1, 1, 1)
    for tp, dp, pp in ((1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2)):
        found = run_ranks(tp * dp * pp, score_on_rank, tmp_path, requests, tp, dp, pp)
        assert found == found[:1] * len(found)
        for scores, each in zip(found[0], wanted, strict=True):
            check(scores, each)
        if tp == pp == 1:  # a copy of the model computes whole batches: not a bit differs
            assert found[0] == alone
