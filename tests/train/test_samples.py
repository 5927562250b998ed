"""The text that a run generates at evaluations is the plain reference model's in every layout, by the same draws."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_ranks
from support.reference import logits
from support.small_runs import LENGTH, VOCAB, core_on_rank, tiny_run, train_run
from support.training import first_weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megazero.generate.sampling import Sampling, next_tokens
from megazero.train.build import step_context
from megazero.train.samples import SampledText, continue_text

PROMPT = [3, 1, 4, 1]
NUM_TOKENS = 6  # more than the window has room for behind the prompt
SHAPE: dict[str, Any] = {"num_layers": 4, "global_batch_size": 16, "hidden_dropout": 0.4}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {
        **{"tp": 2, "dp": 2, "zero_stage": 3, "param_persistence_threshold": 0, "sequence_parallel": True},
        "untie_embeddings_and_output_weights": True,
    },
    {"tp": 2, "pp": 2, "zero_stage": 2, "sequence_parallel": True},
    {"pp": 2, "dp": 2, "zero_stage": 3, "num_layers_per_virtual_pipeline_stage": 1},
    {"pp": 4, "zero_stage": 1, "pipeline_schedule": "zero-bubble", "recompute_granularity": "full"},
)


def settings(layout: dict[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in layout.items() if name not in ("tp", "dp", "pp")}
    degrees = {"tensor_model_parallel_size": layout.get("tp", 1), "pipeline_model_parallel_size": layout.get("pp", 1)}
    return {**SHAPE, **degrees, **own}


def sample_on_rank(rank: int, layouts: Sequence[dict[str, Any]]) -> list[tuple[list[int], bool]]:
    """Return the tokens of every layout, and if the model is in training mode again."""
    found = []
    for layout in layouts:
        config = tiny_run(**settings(layout))
        degrees = {axis: layout.get(axis, 1) for axis in ("tp", "dp", "pp")}
        core = core_on_rank(rank, config, **degrees, is_late=False)
        core.model.train()
        # With one row its tokens are on both tensor-parallel ranks, where the sequence is split.
        text = SampledText(PROMPT, NUM_TOKENS, (1, LENGTH), VOCAB, seed=5, decode=None)
        found.append((continue_text(step_context(config, core), text), core.model.training))
        core.engine.close()
    return found


def expected(layout: dict[str, Any]) -> list[int]:
    weights = first_weights(tiny_run(**settings({**layout, "tp": 1, "pp": 1, "sequence_parallel": False})))
    generator, tokens = torch.Generator().manual_seed(5), list(PROMPT)
    for _ in range(NUM_TOKENS):
        scores = logits(weights, torch.tensor([tokens[-LENGTH:]]))[:, -1]
        tokens += next_tokens(scores, Sampling(temperature=0.8, top_p=0.95), [generator]).tolist()
    return tokens[len(PROMPT) :]


@pytest.mark.gloo
def test_every_layout_draws_the_references_tokens() -> None:
    results = run_ranks(4, sample_on_rank, LAYOUTS)
    for index, layout in enumerate(LAYOUTS):
        plain = {name: value for name, value in layout.items() if name.startswith("untie")}
        for found in results:
            assert found[index] == (expected(plain), True), layout


def test_the_training_is_the_same_without_it(tmp_path: Path) -> None:
    """What is generated between two steps changes no bit of a later one, dropout included."""
    given = {
        "tokenizer_type": "ByteTokenizer",
        "vocab_size": 257,
        "eval_iters": 1,
        "eval_interval": 1,
        "train_iters": 3,
    }
    for name, sampled in (("with", 3), ("without", 0)):
        files = {"metrics_file": str(tmp_path / name), "hidden_dropout": 0.4}
        train_run(0, 1, {**given, **files, "eval_sample_tokens": sampled})
    losses = [
        [json.loads(line).get("loss") for line in (tmp_path / name).read_text().splitlines()]
        for name in ("with", "without")
    ]
    assert losses[0] == losses[1] and len(set(losses[0])) > 2


def test_a_run_shows_it_at_its_evaluations(tmp_path: Path) -> None:
    given = {"tokenizer_type": "ByteTokenizer", "vocab_size": 257, "eval_iters": 1, "eval_interval": 2}
    places = {"tensorboard": True, "save": str(tmp_path / "save")}
    told = train_run(0, 1, {**given, **places, "eval_sample_tokens": 4, "train_iters": 3})
    lines = [line for line in told.text.splitlines() if line.startswith("sample at iteration ")]
    assert [line.split()[3] for line in lines] == ["2", "3"] and all(" goes on " in line for line in lines)
    board = EventAccumulator(str(tmp_path / "save" / "tensorboard")).Reload()
    assert [event.step for event in board.Tensors("samples/validation/text_summary")] == [2, 3]
