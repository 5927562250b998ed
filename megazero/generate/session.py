"""Generates text from a checkpoint on the processes of any layout, whatever layout saved it.

A *session* holds the model, or this rank's part of it, in evaluation mode.  Its input is the *window*, the last tokens
of the text so far, at most as many as the model has positions, and is computed anew for every token (there is no cache
of keys and values).

Every rank has all of the text.  The window goes from pipeline stage to pipeline stage; the first rank of the last stage
chooses the tokens and broadcasts them:

    window -> stage 0 --[n, h]--> stage 1 --[n, h]--> last stage -> logits [b, V] -> tokens [b] -> every rank
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megazero.comm.mesh import ACTIVATIONS, Mesh, gather_json
from megazero.config.run import RunConfig
from megazero.errors import CheckpointError, Problem
from megazero.generate.model_layout import padded_rows, stage_chunks
from megazero.generate.sampling import Sampling, next_tokens
from megazero.model.gpt import GPT
from megazero.parallel.param_spec import StateFragment, named_specs
from megazero.tensor_parallel.layers import TensorParallel
from megazero.tensor_parallel.random import RandomRegions

WORD_EMBEDDING = "embedding.word.weight"


class SavedShape(Protocol):
    """The shape of a saved parameter."""

    @property
    def full_shape(self) -> tuple[int, ...]: ...


class Weights(Protocol):
    """The source of a model's weights: an open checkpoint."""

    @property
    def step(self) -> int:
        """The step of the run that saved them."""

    @property
    def parameters(self) -> Mapping[str, SavedShape]:
        """Every parameter by logical name."""

    def fill(self, fragments: Iterable[StateFragment]) -> None:
        """Write the saved values into the fragments, whatever layout saved them."""


class Session:
    """A model to generate with: this rank's one chunk of it.

    Every method is collective: all ranks of the mesh call it with the same arguments.
    """

    def __init__(self, model: GPT, mesh: Mesh) -> None:
        assert len(model.chunks) == 1, "a stage has one chunk: it runs once for a token"
        self.model = model.eval()
        self._mesh = mesh
        self._chooser = mesh.topology.rank_of(pp=mesh.topology.pp - 1)

    @torch.inference_mode()
    def next_logits(self, tokens: Tensor) -> Tensor | None:
        """Return the logits [b, V] of the token after tokens [b, any length]; None before the last stage."""
        window = tokens[:, -self.model.max_positions :].to(self._mesh.device)
        x = self._run_layers(window)
        if x is None:
            return None
        last = self.model.final_norm(x.view(*window.shape, -1)[:, -1])  # [b, h]
        return self._gather_rows(self.model.logits(last))[:, : self.model.vocab_size]

    def generate(
        self,
        prompt: Sequence[int],
        *,
        sampling: Sampling,
        max_new_tokens: int,
        num_samples: int = 1,
        seed: int = 0,
        stop: int | None = None,
    ) -> list[list[int]]:
        """Continue `prompt` (at least one id) num_samples times; every continuation ends before its first `stop`.

        Every rank has all continuations.
        """
        assert prompt, "the prompt has at least one token"
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([list(prompt)] * num_samples)  # [num_samples, length]
        ended = torch.zeros(num_samples, dtype=torch.bool)
        for _ in range(max_new_tokens):
            chosen = self._choose(tokens, sampling, generator)
            tokens = torch.cat((tokens, chosen.unsqueeze(1)), dim=1)
            if stop is not None:
                ended |= chosen == stop
                if ended.all():
                    break
        return [_until(row, stop) for row in tokens[:, len(prompt) :].tolist()]

    def _choose(self, tokens: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
        """Return the tokens [b] that follow tokens [b, any length], the same on every rank."""
        logits = self.next_logits(tokens)
        mine = tokens.new_zeros(len(tokens)) if logits is None else next_tokens(logits, sampling, generator)
        chosen = mine.to(self._mesh.device)
        self._mesh.world.broadcast(chosen, self._chooser).wait()
        return chosen.cpu()

    def _run_layers(self, window: Tensor) -> Tensor | None:
        """Run this rank's layers, in its turn, on window [b, s]; return [n, h], or None before the last stage."""
        model, chunk, stage = self.model, self.model.chunks[0], self._mesh.coordinate("pp")
        sequences = model.sequences(window.shape[1])
        if chunk.is_first:
            x = model.embed(window, sequences)
        else:
            x = torch.empty(model.activation_shape(window.numel()), dtype=model.dtype, device=window.device)
            self._mesh.channel(ACTIVATIONS, link=stage - 1).receive_into(x, stage - 1).wait()
        x = model.through(0, x, sequences)
        if chunk.is_last:
            return x
        self._mesh.channel(ACTIVATIONS, link=stage).send(x.contiguous(), stage + 1).wait()
        return None

    def _gather_rows(self, logits: Tensor) -> Tensor:
        """Gather this rank's logits [b, Vp/t] to the whole rows, [b, Vp]."""
        tp = self._mesh.axis("tp")
        parts = logits.new_empty((tp.size, *logits.shape))  # [t, b, Vp/t]
        tp.all_gather_into(parts.view(-1), logits.contiguous().view(-1)).wait()
        return parts.transpose(0, 1).flatten(1)


def load_session(config: RunConfig, weights: Weights, mesh: Mesh) -> Session:
    """Load this rank's part of the model of `config`, in float32 (float64 when it was trained so), from `weights`.

    The mesh has a layout that `model_layout.choose_layout` returned for the model.  Raises CheckpointError when the
    weights don't fit, and on all ranks when some have opened other weights than the rest.
    """
    _check_same_step(weights, mesh)
    dtype = torch.float64 if config.precision.precision == "fp64" else torch.float32
    vocab_size, layout = saved_vocab_size(weights), mesh.topology
    random = RandomRegions(config.training.seed, mesh.coordinate("tp"), mesh.device)
    model = GPT(
        config.model,
        vocab_size=vocab_size,
        tp=TensorParallel(mesh.axis("tp"), random, dtype, mesh.device),
        padded_vocab_size=padded_rows(vocab_size, layout),
        chunks=stage_chunks(config.model, vocab_size, stage=mesh.coordinate("pp"), layout=layout),
    )
    weights.fill(
        StateFragment(spec, "weight", 0, spec.numel, parameter.detach().view(-1))
        for spec, parameter in named_specs(model)
    )
    return Session(model, mesh)


def saved_vocab_size(weights: Weights) -> int:
    """Return the rows of the word embedding, without padding; raise CheckpointError when these are no GPT's weights."""
    saved = weights.parameters.get(WORD_EMBEDDING)
    if saved is None or len(saved.full_shape) != 2:
        known = ", ".join(list(weights.parameters)[:5])
        raise CheckpointError(Problem(f"no matrix {WORD_EMBEDDING} among {known}", "the weights are those of a GPT"))
    return saved.full_shape[0]


def _check_same_step(weights: Weights, mesh: Mesh) -> None:
    """Raise CheckpointError if ranks opened different steps, as when a run saves while they open its folder."""
    steps = sorted(set(gather_json(mesh.control, weights.step)))
    if len(steps) > 1:
        given = f"a checkpoint of step {steps[0]} on some processes, of step {steps[-1]} on others"
        raise CheckpointError(Problem(given, "all processes read the same checkpoint", f"--step {steps[-1]}"))


def _until(tokens: list[int], stop: int | None) -> list[int]:
    return tokens[: tokens.index(stop)] if stop in tokens else tokens
