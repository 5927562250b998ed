"""Tests generation from checkpoints of several layouts, on one process and on several, against a reference's logits."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support import reference
from support.checkpoints import run_config, save_checkpoint
from support.models import small_config
from support.processes import mesh_in_worker, run_ranks
from support.small_runs import VOCAB as TINY_VOCAB
from support.small_runs import core_on_rank, tiny_run
from torch import Tensor

from megazero.checkpoint.reader import open_checkpoint
from megazero.checkpoint.writer import Draft, save
from megazero.comm.local import LocalCommunicator
from megazero.command_line.parse import from_yaml
from megazero.config.yaml_file import to_yaml
from megazero.errors import CheckpointError
from megazero.generate.sampling import Sampling
from megazero.generate.session import Continuation, Session, load_session, saved_vocab_size
from megazero.parallel.param_spec import StateFragment, named_specs

VOCAB, PROMPT, WINDOW = 101, [5, 17, 99], 12
LONG_PROMPT = [(7 * place) % VOCAB for place in range(WINDOW + 5)]
GREEDY = Sampling(greedy=True)


def tokens_of(session: Session, prompt: list[int], **settings: object) -> list[list[int]]:
    """Return the tokens of every continuation of one prompt."""
    (found,) = session.generate([prompt], **settings)
    return [continuation.tokens for continuation in found]


def load(folder: Path, rank: int = 0, *, tp: int = 1, pp: int = 1) -> Session:
    checkpoint = open_checkpoint(folder)
    return load_session(from_yaml(checkpoint.config_yaml), checkpoint, mesh_in_worker(rank, tp=tp, pp=pp))


def session_and_weights(folder: Path, tp: int, **changes: object) -> tuple[Session, dict[str, Tensor]]:
    # The initial weights have a large spread, so that the best token is clearly the best.
    config = run_config(small_config(init_method_std=0.3, **changes))
    weights = save_checkpoint(folder, config, vocab_size=VOCAB, tp=tp)
    return load(folder), weights


def logits_after(session: Session, prompt: list[int]) -> Tensor:
    """Return the next token's logits [V] of a session that has the last stage."""
    logits = session.next_logits(torch.tensor([prompt]))
    assert logits is not None
    return logits[0]


def greedy_by_hand(weights: dict[str, Tensor], prompt: list[int], count: int, window: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference.logits(weights, torch.tensor([tokens[-window:]]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(("tp", "untied"), [(1, False), (3, False), (4, True)])
def test_any_layout_continues_as_the_reference(tmp_path: Path, tp: int, untied: bool) -> None:
    session, weights = session_and_weights(tmp_path, tp, untie_embeddings_and_output_weights=untied)
    expected = reference.logits(weights, torch.tensor([PROMPT]))[0, -1]
    torch.testing.assert_close(logits_after(session, PROMPT), expected, rtol=1e-11, atol=1e-12)
    # 12 positions: the window slides from the tenth new token on.
    expected_tokens = [greedy_by_hand(weights, PROMPT, 20, WINDOW)]
    assert tokens_of(session, PROMPT, sampling=GREEDY, max_new_tokens=20) == expected_tokens


def test_samples_differ_and_the_seed_repeats_them(tmp_path: Path) -> None:
    session, _ = session_and_weights(tmp_path, 1)
    once, again, other = (
        tokens_of(session, PROMPT, sampling=Sampling(temperature=2.0), max_new_tokens=8, num_samples=3, seed=seed)
        for seed in (1, 1, 2)
    )
    assert once == again != other
    assert len({tuple(sample) for sample in once}) == 3
    assert all(len(sample) == 8 and max(sample) < VOCAB for sample in once)


def test_what_ends_a_text(tmp_path: Path) -> None:
    session, weights = session_and_weights(tmp_path, 1)
    whole = greedy_by_hand(weights, PROMPT, 12, WINDOW)
    eod = whole[5]

    def ends(prompt: Sequence[int], new: Sequence[int]) -> bool:
        assert prompt == PROMPT
        return new == whole[:4]

    before_eod = Continuation(whole[: whole.index(eod)], "eod")
    assert session.generate([PROMPT], sampling=GREEDY, max_new_tokens=12, num_samples=2, eod=eod) == [[before_eod] * 2]
    settings = {"sampling": GREEDY, "ends": ends}
    for most, expected in ((12, "stop"), (4, "stop"), (3, "length")):
        found = session.generate([PROMPT], max_new_tokens=most, **settings)
        assert found == [[Continuation(whole[: min(most, 4)], expected)]]
    assert session.generate([], max_new_tokens=3, **settings) == []


def test_dropout_is_off(tmp_path: Path) -> None:
    session, weights = session_and_weights(tmp_path, 1, hidden_dropout=0.5, attention_dropout=0.5)
    expected = reference.logits(weights, torch.tensor([PROMPT]))[0, -1]
    torch.testing.assert_close(logits_after(session, PROMPT), expected, rtol=1e-11, atol=1e-12)


def test_lower_precisions_are_read_in_float32(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, run_config(small_config(), precision="bf16"), vocab_size=VOCAB, tp=2)
    assert {parameter.dtype for parameter in load(tmp_path).model.parameters()} == {torch.float32}


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, run_config(small_config()), vocab_size=VOCAB, tp=1)
    with pytest.raises(CheckpointError, match=r"layers\.3"):
        load_session(run_config(small_config(num_layers=4)), open_checkpoint(tmp_path), mesh_in_worker(0))


def test_weights_without_a_word_embedding_are_refused() -> None:
    class Empty:
        def __init__(self) -> None:
            self.parameters: dict[str, object] = {}

    with pytest.raises(CheckpointError, match=r"embedding\.word\.weight"):
        saved_vocab_size(Empty())


class Layout(NamedTuple):
    """The tensor- and pipeline-parallel degrees to generate with."""

    tp: int
    pp: int


class Observed(NamedTuple):
    """The layers, elements, logits and texts of one rank; its logits are None before the last stage."""

    layers: list[int]
    num_elements: int
    logits: list[Tensor | None]
    texts: list[list[list[Continuation]]]


def observe(session: Session, stop: int) -> Observed:
    """Return logits after a short and a long prompt, and texts: greedy, drawn, drawn until a stop, of several rows."""
    batch = torch.tensor([PROMPT, PROMPT[::-1]])
    drawn = Sampling(temperature=1.5, top_k=40, top_p=0.95)
    return Observed(
        list(session.model.chunks[0].layers),
        sum(parameter.numel() for parameter in session.model.parameters()),
        [session.next_logits(tokens) for tokens in (batch, torch.tensor([LONG_PROMPT]))],
        [
            session.generate([PROMPT, LONG_PROMPT], sampling=GREEDY, max_new_tokens=WINDOW + 3),
            session.generate([LONG_PROMPT, PROMPT], sampling=drawn, max_new_tokens=6, num_samples=3, seed=1),
            session.generate([PROMPT], sampling=GREEDY, max_new_tokens=WINDOW, num_samples=2, eod=stop),
        ],
    )


def observe_on_rank(rank: int, folder: Path, layout: Layout, stop: int) -> Observed:
    return observe(load(folder, rank, tp=layout.tp, pp=layout.pp), stop)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("layout", "num_layers", "split", "untied"),
    [
        (Layout(tp=2, pp=1), 3, [3], False),
        (Layout(tp=1, pp=2), 3, [1, 2], True),
        (Layout(tp=1, pp=3), 4, [1, 2, 1], False),
        (Layout(tp=2, pp=2), 3, [1, 2], True),
        (Layout(tp=1, pp=4), 2, [0, 1, 1, 0], False),
    ],
)
def test_several_processes_continue_as_one(
    tmp_path: Path, layout: Layout, num_layers: int, split: list[int], untied: bool
) -> None:
    alone, weights = session_and_weights(tmp_path, 3, num_layers=num_layers, untie_embeddings_and_output_weights=untied)
    stop = greedy_by_hand(weights, PROMPT, 5, WINDOW)[-1]
    expected = observe(alone, stop)
    found = run_ranks(layout.tp * layout.pp, observe_on_rank, tmp_path, layout, stop)
    stages = [found[first : first + layout.tp] for first in range(0, len(found), layout.tp)]
    assert [len(rank.layers) for rank in found] == [length for length in split for _ in range(layout.tp)]
    assert [rank.texts for rank in found] == [expected.texts] * len(found)
    assert [rank.logits for stage in stages[:-1] for rank in stage] == [[None, None]] * (len(found) - layout.tp)
    for rank in stages[-1]:
        torch.testing.assert_close(rank.logits, expected.logits, rtol=0, atol=1e-12)
    assert max(rank.num_elements for rank in found) < 0.8 * expected.num_elements


def save_on_rank(rank: int, folder: Path) -> None:
    """Save a checkpoint of a pipeline: initial weights of two stages with a padded vocabulary cut over ranks."""
    config = tiny_run(
        num_layers=3,
        max_position_embeddings=WINDOW,
        make_vocab_size_divisible_by=8,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_split="1,2",
    )
    core = core_on_rank(rank, config, tp=2, pp=2)
    fragments = (fragment for fragment in core.engine.owned_state() if fragment.kind == "weight")
    save(Draft(folder, 1, {}, to_yaml(config)), fragments, control=core.mesh.control)
    core.engine.close()


def long_greedy_on_rank(rank: int, folder: Path, layout: Layout) -> list[list[int]]:
    session = load(folder, rank, tp=layout.tp, pp=layout.pp)
    return tokens_of(session, PROMPT[:1], sampling=GREEDY, max_new_tokens=20, num_samples=2)


@pytest.mark.gloo
def test_a_pipelines_checkpoint_is_read_by_other_layouts(tmp_path: Path) -> None:
    run_ranks(4, save_on_rank, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    weights = {name: checkpoint.read_full(name) for name in checkpoint.parameters}
    assert weights["embedding.word.weight"].shape[0] == TINY_VOCAB
    expected = [greedy_by_hand(weights, PROMPT[:1], 20, WINDOW)] * 2
    assert long_greedy_on_rank(0, tmp_path, Layout(1, 1)) == expected
    for layout in (Layout(2, 1), Layout(1, 3), Layout(4, 1)):
        found = run_ranks(layout.tp * layout.pp, long_greedy_on_rank, tmp_path, layout)
        assert found == [expected] * len(found)


def load_own_on_rank(rank: int, root: Path) -> str:
    try:
        load(root / str(rank), rank, pp=2)
    except CheckpointError as error:
        return str(error)
    return "loaded"


@pytest.mark.gloo
def test_ranks_that_see_different_steps_all_refuse(tmp_path: Path) -> None:
    """One rank opens the folder before a run has saved a new step, the other after it."""
    alone, _ = session_and_weights(tmp_path / "0", 1)
    fragments = (
        StateFragment(spec, "weight", 0, spec.numel, parameter.detach().view(-1))
        for spec, parameter in named_specs(alone.model)
    )
    draft = Draft(tmp_path / "1", 8, {}, open_checkpoint(tmp_path / "0").config_yaml)
    save(draft, fragments, control=LocalCommunicator())
    found = run_ranks(2, load_own_on_rank, tmp_path)
    assert found[0] == found[1] and "step 7 on some processes, of step 8 on others" in found[0]
