"""Tests that stage 2 holds no full gradients: only the owned slice, constant-size buffers, and autograd's newest."""

import pytest
import torch
from support.configs import make_run
from support.flat_layout import padded_numel
from support.gradient_meter import GradientMeter
from support.processes import mesh_in_worker, run_ranks
from support.training import SETTINGS

from megazero.data.loader import MicroBatch, StepBatch
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.param_spec import named_specs
from megazero.tensor_parallel.onednn import is_faster
from megazero.train.build import build_components, step_context
from megazero.train.step import StepControls, training_step

HIDDEN = 60


def peak_of_a_step(rank: int, num_layers: int, stage: int, untied: bool = False) -> dict[str, int]:
    """Return bytes: most gradients alive at once outside buffers, largest parameter, persistent gradients, buffers."""
    changes = {"num_layers": num_layers, "zero_stage": stage, "precision": "fp32", "mock_data": True}
    changes["untie_embeddings_and_output_weights"] = untied
    config = make_run(**{**SETTINGS, **changes, "micro_batch_size": 2, "global_batch_size": 4})
    mesh = mesh_in_worker(rank, dp=2, is_late=False)
    buffers = FusedBuffers(0, mesh.device)
    core = build_components(config, mesh, buffers, vocab_size=257)
    matrices = {name.name: parameter.numel() for name, parameter in named_specs(core.model) if parameter.ndim > 1}
    # No activation of this model has these sizes: 2 x 24 tokens give multiples of 48.
    numels = frozenset(numel for numel in matrices.values())
    parts = step_context(config, core)
    tokens = torch.arange(48).view(2, 24) % 257
    batch = StepBatch(0, [MicroBatch(0, tokens, tokens, None)])
    training_step(parts, batch, StepControls(1e-3, 1.0))  # buffers are made once
    with GradientMeter(numels) as meter:
        training_step(parts, batch, StepControls(1e-3, 1.0))
    core.engine.close()
    arenas = core.engine.gradient_arenas
    slots = sum(arena.capacity_bytes for name, arena in arenas.items() if name == "buckets")
    return {
        "peak": meter.peak,
        "largest": 4 * max(matrices.values()),
        "persistent": core.engine.model_state_bytes().gradients,
        "buffers": buffers.total_bytes + slots,
        "buffer": 4 * core.engine.layout.max_reduced_numel,
        "owned": 4 * padded_numel(core.engine.layout, trainable=True) // 2,
    }


@pytest.mark.gloo
@pytest.mark.parametrize("untied", [True, False])
def test_no_term_grows_with_depth_but_the_owned_slice(untied: bool) -> None:
    shallow, deep = (run_ranks(2, peak_of_a_step, depth, 2, untied)[0] for depth in (2, 8))
    # One matrix is alive at a time; beside it only the position table's gradient, which is made last. A tied matrix
    # gets two contributions, the head's (held through backward) and the embedding's; autograd adds them in place,
    # except under an observer like this one, which therefore sees the sum as a third piece.  oneDNN makes the head's
    # product, of up to 1 MiB, beside its sum, on the processors where it is the faster library.
    pieces = 1 + is_faster(torch.device("cpu"), torch.float32) if untied else 3
    position_table = 4 * 24 * HIDDEN
    for seen in (shallow, deep):
        assert seen["persistent"] == seen["owned"]
        assert seen["largest"] <= seen["peak"] <= pieces * seen["largest"] + 2 * position_table
    assert deep["peak"] == shallow["peak"]
    assert deep["buffers"] == shallow["buffers"] <= 6 * shallow["buffer"]


@pytest.mark.gloo
def test_resident_gradients_do_grow() -> None:
    """Stage 0 keeps the gradients of all layers, which shows that the observer above counts gradients."""
    shallow, deep = (run_ranks(2, peak_of_a_step, depth, 0)[0] for depth in (2, 8))
    assert deep["persistent"] > 2 * shallow["persistent"]
    assert shallow["persistent"] == 2 * shallow["owned"]
