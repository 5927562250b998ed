"""A checkpoint that is evaluated: opened and checked before any process group exists, then loaded on its layout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megazero.checkpoint.reader import Checkpoint, open_complete
from megazero.comm.startup import choose_device
from megazero.command_line.parse import from_yaml
from megazero.config import derived
from megazero.config.run import DataConfig, RunConfig
from megazero.console import Console
from megazero.data.tokenizers import Tokenizer
from megazero.evaluate.scoring import Scorer
from megazero.generate.job import joined
from megazero.generate.model_layout import choose_layout
from megazero.generate.session import load_session, saved_vocab_size
from megazero.parallel.launch import Launch
from megazero.parallel.threads import use_cpu_threads
from megazero.parallel.topology import Topology
from megazero.train.start.inputs import tokenizer_of_run


@dataclass(frozen=True)
class OpenedModel:
    """A checkpoint, and how this process takes part in its evaluation."""

    checkpoint: Checkpoint
    config: RunConfig
    tokenizer: Tokenizer
    layout: Topology
    launch: Launch
    device: torch.device

    @property
    def length(self) -> int:
        """The most ids that the model reads at a time."""
        return derived.max_position_embeddings(self.config.model)

    @contextmanager
    def loaded(self, *, rows: int, console: Console) -> Iterator[Scorer]:
        """Join the job and load the weights, within the block.  rows: windows that the model reads at a time."""
        use_cpu_threads(None, self.launch, self.device)
        minutes = derived.collective_limit_minutes(self.config.limits)
        with joined(self.launch, self.layout, self.device, timeout_minutes=minutes) as mesh:
            yield Scorer(load_session(self.config, self.checkpoint, mesh), mesh, rows=rows, console=console)


def open_model(
    load: Path,
    launch: Launch,
    *,
    step: int | None = None,
    tp: int = 1,
    pp: int = 1,
    across_nodes: bool = False,
    device: str = "auto",
    with_flags: Callable[[DataConfig], DataConfig] = lambda data: data,
) -> OpenedModel:
    """Open a run's checkpoints, or one of them, for a layout of tensor size tp, pipeline size pp and as many copies.

    with_flags: returns the run's data settings with the tokenizer that the user has given.  Raises UserError.
    """
    checkpoint = open_complete(load, step=step)
    config = from_yaml(checkpoint.config_yaml, origin=f"the configuration in {checkpoint.folder}")
    layout = choose_layout(config.model, tp=tp, pp=pp, nodes=launch.nodes, across_nodes=across_nodes, with_copies=True)
    tokenizer = tokenizer_of_run(with_flags(config.data), vocab_size=saved_vocab_size(checkpoint))
    return OpenedModel(checkpoint, config, tokenizer, layout, launch, choose_device(device, launch))
