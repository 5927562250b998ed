"""Checkpoints of small models for tests that only read them."""

from dataclasses import replace
from pathlib import Path

import torch
from support.models import Piece, assemble, build_gpt, context, pieces
from torch import Tensor

from megazero.checkpoint.reader import Checkpoint
from megazero.checkpoint.writer import Draft, save
from megazero.comm.local import LocalCommunicator
from megazero.config.engine_sections import OptimizerConfig, PrecisionConfig
from megazero.config.model import ModelConfig
from megazero.config.run import DataConfig, RunConfig, TrainingConfig
from megazero.config.yaml_file import to_yaml
from megazero.model.initial_values import fill_initial_, initialize_
from megazero.parallel.param_spec import InitialValue, StateFragment, named_specs


class Axis:
    """A stand-in for a communicator: it has a rank and a size, enough to build a model, and cannot communicate."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def run_config(model: ModelConfig, *, precision: str = "fp64", data: DataConfig | None = None) -> RunConfig:
    """Return the configuration of a run that trains `model`."""
    return RunConfig(
        model=model,
        training=TrainingConfig(micro_batch_size=1, train_iters=1),
        optimizer=OptimizerConfig(lr=1e-3),
        precision=PrecisionConfig(precision=precision),
        data=data or DataConfig(),
    )


def saved_states(checkpoint: Checkpoint) -> dict[tuple[str, str], Tensor]:
    """Return every saved tensor, whole, by its parameter's name and its kind."""
    list(checkpoint.boxes())  # Reads all indices, of which the header of a file is otherwise checked for every tensor.
    return {
        (name, kind): checkpoint.read_full(name, kind)
        for name, saved in checkpoint.parameters.items()
        for kind in saved.kinds
    }


def assert_equal_states(one: Checkpoint, other: Checkpoint) -> None:
    """Check that all that one checkpoint holds is in the other, to the bit."""
    held = saved_states(other)
    for key, value in saved_states(one).items():
        assert torch.equal(value, held[key]), key


def save_checkpoint(root: Path, config: RunConfig, *, vocab_size: int, tp: int, seed: int = 3) -> dict[str, Tensor]:
    """Save initial weights, partitioned over `tp` ranks with a padded vocabulary; return the full logical weights.

    One process stands for all ranks: it gives every rank's fragments to the writer.
    """
    fragments: list[StateFragment] = []
    ranks: list[list[Piece]] = []
    for rank in range(tp):
        axis = context(Axis(rank, tp), dtype=torch.float64)
        model = build_gpt(config.model, axis, vocab_size=vocab_size, divisible_by=8)
        initialize_(model, seed)
        for spec, parameter in named_specs(model):
            if spec.name.endswith("lora_B.weight"):  # as trained ones are, not zero
                fill_initial_(parameter.detach().view(-1), replace(spec, init=InitialValue("normal", 0.3)), seed)
        ranks.append(pieces(model))
        for spec, parameter in named_specs(model):
            if spec.is_counted_on({"tp": rank}):
                fragments.append(StateFragment(spec, "weight", 0, spec.numel, parameter.detach().view(-1)))
    save(Draft(root, 7, {}, to_yaml(config)), fragments, control=LocalCommunicator())
    return assemble(ranks)
