"""Tests the statistics of weights, moments and gradients: of a layout, those of one process and of plain PyTorch."""

from typing import Any, NamedTuple

import pytest
import torch
from support.processes import run_ranks
from support.reference import gradients, mean_loss
from support.small_runs import EOD, DrawnSamples, core_on_rank, owned_boxes, reference_batch, tiny_run
from support.training import Saved, assemble
from torch import Tensor

from megazero.data.loader import build_step_batch
from megazero.train.build import batch_layout, step_context
from megazero.train.step import StepControls, training_step
from megazero.zero.statistics import EVERY_STATISTIC, layers_of, read_statistics, take_statistics

GLOBAL_BATCH, LAYERS, HIDDEN = 8, 2, 16
KINDS = {"weight": "weight", "momentum": "exp_avg", "variance": "exp_avg_sq"}
CHOICE = EVERY_STATISTIC._replace(layer_grad_norms=True)
LAYERS_OF = ["embedding.word", "embedding.position", "layers.0", "layers.1", "final_norm"]
# Three rows of words are padding; positions beyond the sequence, and words that do not occur, have gradients of zeros.
MODEL = {"num_layers": LAYERS, "max_position_embeddings": 11, "make_vocab_size_divisible_by": 16}
UNTIED = {"untie_embeddings_and_output_weights": True}
FURTHER: tuple[dict[str, Any], ...] = (
    {},
    {**UNTIED, "sequence_parallel": True},
    {**UNTIED, "precision": "bf16"},
    {"sequence_parallel": True},
)


class Outcome(NamedTuple):
    """One rank's figures, what it saves before the last step and after it, and the bytes that the figures have sent."""

    figures: dict[str, float]
    before: list[Saved]
    after: list[Saved]
    sent: dict[str, dict[str, int]]


def train_and_take(rank: int, size: dict[str, int], stages: list[tuple[int, dict[str, Any]]]) -> list[Outcome]:
    """Take two steps in every ZeRO stage, with further settings each, and the statistics after the second."""
    outcomes = []
    for stage, further in stages:
        layout = {"tensor_model_parallel_size": size.get("tp", 1), "pipeline_model_parallel_size": size.get("pp", 1)}
        batch = {"micro_batch_size": GLOBAL_BATCH // (2 * size.get("dp", 1)), "global_batch_size": GLOBAL_BATCH}
        config = tiny_run(**{**MODEL, **layout, **batch, "zero_stage": stage, "eod_mask_loss": True, **further})
        core = core_on_rank(rank, config, **size)
        context, before = step_context(config, core), []
        for step in range(2):
            before = owned_boxes(core)
            batch_of_step = build_step_batch(DrawnSamples(), step * GLOBAL_BATCH, batch_layout(config, core.mesh, EOD))
            report = training_step(context, batch_of_step, StepControls(1e-2, 1.0))
        core.mesh.meter.reset()
        values = take_statistics(core.engine, CHOICE)
        sent = core.mesh.meter.bytes_by_axis()
        core.engine.close()
        norm = report.grad_norm.item()
        figures = read_statistics(values.tolist(), CHOICE, layers_of(core.engine), grad_norm=norm)
        outcomes.append(Outcome(figures, before, owned_boxes(core), sent))
    return outcomes


def in_plain_torch(full: dict[str, dict[str, Tensor]]) -> dict[str, float]:
    """Return the norms of whole tensors, by kind and parameter."""
    flat = {name: torch.cat([x.double().flatten() for x in full[kind].values()]) for name, kind in KINDS.items()}
    flat["variance_sqrt"] = flat["variance"].sqrt()
    orders = {"l1": 1.0, "l2": 2.0, "abs_max": float("inf")}
    norm = torch.linalg.vector_norm
    return {f"{name}_{suffix}": norm(x, order).item() for name, x in flat.items() for suffix, order in orders.items()}


def whole(ranks: list[list[Saved]]) -> dict[str, dict[str, Tensor]]:
    return {kind: assemble(box for rank in ranks for box in rank if box.kind == kind) for kind in KINDS.values()}


@pytest.mark.gloo
def test_every_layout_counts_every_element_once() -> None:
    """In all stages a layout of 8 processes has the figures of one, and those that plain PyTorch finds in its state."""
    stages = list(enumerate(FURTHER))
    split = run_ranks(8, train_and_take, {"tp": 2, "pp": 2, "dp": 2}, stages)
    alone = [train_and_take(0, {}, [(0, {**further, "sequence_parallel": False})])[0] for _, further in stages]
    for (stage, further), single, *ranks in zip(stages, alone, *split, strict=True):
        found = ranks[0].figures
        assert all(other.figures == found for other in ranks), "every rank has the figures of all"
        plain = in_plain_torch(whole([rank.after for rank in ranks]))
        assert {name: found[name] for name in plain} == pytest.approx(plain, rel=1e-9), (stage, further)
        layers = [*LAYERS_OF, *(["head"] if further.get("untie_embeddings_and_output_weights") else [])]
        names = {f"grad_norm.{layer}" for layer in layers}
        assert found.keys() == plain.keys() | {"params_norm", "num_zeros"} | names
        assert found["params_norm"] == found["weight_l2"]
        assert all(rank.sent["world"] == {"all_gather": 7 * 8 * (17 + len(layers))} for rank in ranks), ranks[0].sent
        if "precision" in further:
            continue
        for name in plain:
            assert found[name] == pytest.approx(single.figures[name], rel=1e-9), (stage, name)
        weights = whole([single.before])["weight"]
        live = {name: value.double().requires_grad_() for name, value in weights.items()}
        loss = mean_loss(live, reference_batch(GLOBAL_BATCH, GLOBAL_BATCH, masked=True))
        grads = gradients(loss, live)
        for layer in layers:
            own = [grad.flatten() for name, grad in grads.items() if f"{name}.".startswith(f"{layer}.")]
            expected = torch.cat(own).norm().item()
            assert found[f"grad_norm.{layer}"] == pytest.approx(expected, rel=1e-6), (stage, layer)
        zeros = {name: int((grad == 0).sum()) for name, grad in grads.items()}
        num_zeros = sum(zeros.values()) - sum(n for name, n in zeros.items() if name.endswith("qkv.bias"))
        assert num_zeros >= 3 * HIDDEN
        # A bias of keys has no effect, so that its gradient is a zero, or what rounding leaves of one.
        for figures in (found, single.figures):
            assert 0 <= figures["num_zeros"] - num_zeros <= LAYERS * HIDDEN, (stage, num_zeros)
