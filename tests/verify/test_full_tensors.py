"""Full tensors assembled from a rank's own parts equal those of autograd and the engine on one process; digests too."""

import pytest
import torch
from support.each import each
from support.small_runs import core_on_rank, tiny_run

from megazero.data.loader import build_step_batch
from megazero.data.mock import MockSamples
from megazero.train.build import batch_layout, step_context
from megazero.train.step import StepControls, training_step
from megazero.verify.full_tensors import OwnedTensors, digest


@each("stage", [0, 1, 2, 3])
def test_one_process_owns_everything(stage: int) -> None:
    config = tiny_run(zero_stage=stage, gradient_predivide_factor=4.0)
    core = core_on_rank(0, config)
    batch = build_step_batch(MockSamples(29, 8, 1), 0, batch_layout(config, core.mesh, None))
    gradients = {}
    for name, parameter in core.model.named_parameters():
        parameter.register_hook(lambda found, name=name: gradients.__setitem__(name, found.clone()))
    assert len(batch.micro_batches) == 1, "a hook sees the whole gradient, which nobody has divided yet"
    report = training_step(step_context(config, core), batch, StepControls(1e-2, 1.0))
    owned = OwnedTensors(core)
    square = 0.0
    for name, spec in owned.specs.items():
        full = owned.full(name, "gradient", spec.full_shape)
        torch.testing.assert_close(full.flatten(), gradients[name].flatten(), rtol=1e-13, atol=1e-16)
        square += float(full.square().sum())
    assert square**0.5 == pytest.approx(report.grad_norm.item(), rel=1e-12)
    core.engine.close()


def test_weights_are_those_of_the_model() -> None:
    config = tiny_run(zero_stage=0)
    core = core_on_rank(0, config)
    owned = OwnedTensors(core)
    for name, parameter in core.model.named_parameters():
        full = owned.full(name, "weight", owned.specs[name].full_shape)
        assert torch.equal(full.flatten(), parameter.detach().flatten())
    nothing = owned.full("layers.7.mlp.up.bias", "weight", (5,))
    assert torch.equal(nothing, torch.zeros(5, dtype=torch.float64))


def test_copies_are_told_by_axis() -> None:
    owned = OwnedTensors(core_on_rank(0, tiny_run(zero_stage=3)))
    whole = owned.copies("weight")
    assert "layers.0.input_norm.weight" in whole["tp"]["weight"]
    assert "layers.0.mlp.up.weight" not in whole["tp"]["weight"]
    assert whole["dp"] == {"weight": {}} and whole["ends"] == {"weight": {}}
    kept = OwnedTensors(core_on_rank(0, tiny_run(zero_stage=1)))
    assert kept.copies("weight")["dp"]["weight"].keys() == kept.specs.keys()
    assert kept.copies("gradient")["dp"]["gradient"] == {}
    plain = OwnedTensors(core_on_rank(0, tiny_run(zero_stage=0)))
    assert plain.copies("gradient")["dp"]["gradient"].keys() == plain.specs.keys()


def test_a_digest_is_of_bits() -> None:
    x = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    assert digest([x]) == digest([x.clone()]) == digest([x[:1], x[1:]])
    assert digest([x]) != digest([torch.tensor([-0.0, 1.0, 2.0], dtype=torch.float64)])
    assert digest([]) == digest([x[:0]])
