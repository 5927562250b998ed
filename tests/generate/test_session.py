"""Generation from checkpoints of several layouts, against the plain reference's logits."""

from pathlib import Path

import pytest
import torch
from support import reference
from support.checkpoints import run_config, save_checkpoint
from support.models import CPU, small_config

from megazero.checkpoint.reader import open_checkpoint
from megazero.errors import CheckpointError
from megazero.generate.sampling import Sampling
from megazero.generate.session import Session, load_session, saved_vocab_size

VOCAB, PROMPT = 101, [5, 17, 99]
GREEDY = Sampling(greedy=True)


def session_and_weights(folder: Path, tp: int, **changes: object) -> tuple[Session, dict[str, torch.Tensor]]:
    # A large spread of initial weights, so that the best token is clearly the best.
    config = run_config(small_config(init_method_std=0.3, **changes))
    weights = save_checkpoint(folder, config, vocab_size=VOCAB, tp=tp)
    return load_session(config, open_checkpoint(folder), CPU), weights


def greedy_by_hand(weights: dict[str, torch.Tensor], prompt: list[int], count: int, window: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference.logits(weights, torch.tensor([tokens[-window:]]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(("tp", "untied"), [(1, False), (3, False), (4, True)])
def test_any_layout_continues_as_the_reference(tmp_path: Path, tp: int, untied: bool) -> None:
    session, weights = session_and_weights(tmp_path, tp, untie_embeddings_and_output_weights=untied)
    logits = session.next_logits(torch.tensor([PROMPT]))
    torch.testing.assert_close(
        logits[0], reference.logits(weights, torch.tensor([PROMPT]))[0, -1], rtol=1e-11, atol=1e-12
    )
    assert logits.shape == (1, VOCAB)
    # 12 positions: the window slides from the tenth new token on.
    assert session.generate(PROMPT, sampling=GREEDY, max_new_tokens=20) == [greedy_by_hand(weights, PROMPT, 20, 12)]


def test_samples_differ_and_the_seed_repeats_them(tmp_path: Path) -> None:
    session, _ = session_and_weights(tmp_path, 1)
    once, again, other = (
        session.generate(PROMPT, sampling=Sampling(temperature=2.0), max_new_tokens=8, num_samples=3, seed=seed)
        for seed in (1, 1, 2)
    )
    assert once == again != other
    assert len({tuple(sample) for sample in once}) == 3
    assert all(len(sample) == 8 and max(sample) < VOCAB for sample in once)


def test_samples_end_before_the_stop_token(tmp_path: Path) -> None:
    session, weights = session_and_weights(tmp_path, 1)
    whole = greedy_by_hand(weights, PROMPT, 12, 12)
    stop = whole[5]
    found = session.generate(PROMPT, sampling=GREEDY, max_new_tokens=12, num_samples=2, stop=stop)
    assert found == [whole[: whole.index(stop)]] * 2


def test_dropout_is_off(tmp_path: Path) -> None:
    session, weights = session_and_weights(tmp_path, 1, hidden_dropout=0.5, attention_dropout=0.5)
    expected = reference.logits(weights, torch.tensor([PROMPT]))[0, -1]
    torch.testing.assert_close(session.next_logits(torch.tensor([PROMPT]))[0], expected, rtol=1e-11, atol=1e-12)


def test_lower_precisions_are_read_in_float32(tmp_path: Path) -> None:
    config = run_config(small_config(), precision="bf16")
    save_checkpoint(tmp_path, config, vocab_size=VOCAB, tp=2)
    session = load_session(config, open_checkpoint(tmp_path), CPU)
    assert {parameter.dtype for parameter in session.model.parameters()} == {torch.float32}


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, run_config(small_config()), vocab_size=VOCAB, tp=1)
    with pytest.raises(CheckpointError, match=r"layers\.3"):
        load_session(run_config(small_config(num_layers=4)), open_checkpoint(tmp_path), CPU)


def test_weights_without_a_word_embedding_are_refused() -> None:
    class Empty:
        def __init__(self) -> None:
            self.parameters: dict[str, object] = {}

    with pytest.raises(CheckpointError, match=r"embedding\.word\.weight"):
        saved_vocab_size(Empty())  # type: ignore[arg-type]
