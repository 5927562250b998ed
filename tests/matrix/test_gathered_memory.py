"""Tests stage 3's gathered parameters: at most two units at a time however deep the model, and 3 Psi of traffic."""

from typing import Any, NamedTuple

import pytest
import torch
from support.configs import make_run
from support.flat_layout import padded_numel
from support.processes import mesh_in_worker, run_ranks
from support.training import SETTINGS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.data.loader import MicroBatch, StepBatch
from megazero.memory.fused_buffers import FusedBuffers
from megazero.train.build import build_components, step_context
from megazero.train.step import StepControls, training_step

RANKS = 2
NORM = 2 * 60 + (-2 * 60) % (16 * RANKS)  # elements of the final norm, padded


class FlatsAlive(TorchDispatchMode):
    """A mode that reads the storage bytes of some tensors before every operation; `peak` is the largest sum."""

    def __init__(self, flats: list[Tensor]) -> None:
        super().__init__()
        self._storages = [flat.untyped_storage() for flat in flats]
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._storages))
        return func(*args, **(kwargs or {}))


class Seen(NamedTuple):
    """Figures of the third step, by when the order of uses is recorded, all in elements."""

    counted_peak: int
    watched_peak: int
    largest_unit: int
    word: int
    padded: int
    gathered: int
    reduced: int
    left: int


def third_step(rank: int, num_layers: int, changes: dict[str, Any]) -> Seen:
    settings = {"num_layers": num_layers, "zero_stage": 3, "precision": "fp32", "mock_data": True}
    config = make_run(**{**SETTINGS, **settings, "micro_batch_size": 2, "global_batch_size": 4, **changes})
    mesh = mesh_in_worker(rank, dp=RANKS, is_late=False)
    core = build_components(config, mesh, FusedBuffers(0, mesh.device), vocab_size=257)
    parts = step_context(config, core)
    tokens = torch.arange(48).view(2, 24) % 257
    batch = StepBatch(0, [MicroBatch(0, tokens, tokens, None)])
    for _ in range(2):
        training_step(parts, batch, StepControls(1e-3, 1.0))
    mesh.meter.reset()
    sections = core.engine.layout.sections
    with FlatsAlive([core.engine._shards.flat(section) for section in sections]) as watch:
        training_step(parts, batch, StepControls(1e-3, 1.0))
    core.engine.close()
    sent = mesh.meter.bytes_by_axis()["dp"]
    units = {section.unit: section.numel for section in sections}
    left, peak = core.engine.gathered_numel
    return Seen(
        counted_peak=peak,
        watched_peak=watch.peak // 4,
        largest_unit=max(units.values()),
        word=units["embedding.word"],
        padded=padded_numel(core.engine.layout, trainable=True),
        gathered=sent["all_gather"] // 4 * RANKS // (RANKS - 1),
        reduced=sent["reduce_scatter"] // 4 * RANKS // (RANKS - 1),
        left=left,
    )


@pytest.mark.gloo
def test_peak_stays_under_two_units_however_deep_the_model() -> None:
    shallow, deep = (run_ranks(RANKS, third_step, depth, {})[0] for depth in (4, 16))
    assert deep.padded > 2.5 * shallow.padded
    for seen in (shallow, deep):
        assert seen.watched_peak <= seen.counted_peak <= 2 * seen.largest_unit
        assert seen.watched_peak > seen.largest_unit, "something is gathered ahead"
        assert seen.left == 0
    assert deep.counted_peak == shallow.counted_peak


@pytest.mark.gloo
def test_without_look_ahead_there_is_one_unit_at_a_time() -> None:
    (seen, _) = run_ranks(RANKS, third_step, 4, {"prefetch_bucket_size": 0})
    assert seen.watched_peak == seen.counted_peak == seen.largest_unit


@pytest.mark.gloo
@pytest.mark.parametrize("depth", [2, 6])
def test_a_step_moves_less_than_three_psi(depth: int) -> None:
    """Units are gathered twice: the tied matrix for embedding and head, not for backward.

    Once are the position table, and the last block and the final norm, which stay from forward to backward.
    """
    (seen, _) = run_ranks(RANKS, third_step, depth, {})
    position = 24 * 60 + (-24 * 60) % (16 * RANKS)
    assert seen.reduced == seen.padded
    assert seen.gathered == 2 * seen.padded - position - seen.largest_unit - NORM
    assert seen.gathered + seen.reduced < 3 * seen.padded


@pytest.mark.gloo
def test_a_model_no_larger_than_two_units_is_gathered_once() -> None:
    (seen, _) = run_ranks(RANKS, third_step, 1, {})
    assert seen.counted_peak < seen.padded <= 2 * seen.largest_unit, "backward does not read the position table"
    assert (seen.gathered, seen.left) == (seen.padded, 0)


@pytest.mark.gloo
def test_an_untied_head_is_gathered_once() -> None:
    """The head's gradients are made in forward, so no backward reads its matrix, nor the embedding's two tables."""
    (seen, _) = run_ranks(RANKS, third_step, 1, {"untie_embeddings_and_output_weights": True})
    position = 24 * 60 + (-24 * 60) % (16 * RANKS)
    head = seen.word
    assert seen.gathered == 2 * seen.padded - position - seen.word - head - seen.largest_unit - NORM


@pytest.mark.gloo
def test_what_is_kept_for_reuse_is_not_gathered_again() -> None:
    """Every unit is gathered once if there is room: model states as in stage 2 during a pass, and traffic of 2 Psi."""
    (seen, _) = run_ranks(RANKS, third_step, 4, {"max_reuse_distance": 10**9})
    assert seen.gathered == seen.padded
    position = 24 * 60 + (-24 * 60) % (16 * RANKS)
    assert seen.counted_peak == seen.padded - position, "nothing in backward reads the position table"
    (limited, _) = run_ranks(
        RANKS, third_step, 4, {"max_reuse_distance": 10**9, "max_live_parameters": seen.padded // 2}
    )
    assert limited.counted_peak <= seen.padded // 2
    assert seen.padded < limited.gathered <= 2 * seen.padded
