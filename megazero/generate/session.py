"""Generates text from a checkpoint on the processes of any layout, whatever layout saved it.

A *session* holds the model, or this rank's part of it, in evaluation mode.  A prompt is read in one pass, which fills a
row of the cache of keys and values (`model/key_value_cache.py`); from then on each pass computes the newest token of
every text, and attends to the cached ones.  Texts that end leave the cache, and waiting ones take their rows.

A text with more tokens than the model has positions is continued by its last ones, the *window*, as many as there are
positions.  With every token all of them get other positions, and the first one is lost to those behind it, so that no
key or value stays what it was: such a text leaves the cache, and its window is computed anew for every token.

Every rank has all texts.  New tokens go from pipeline stage to pipeline stage; the first rank of the last stage chooses
what follows and broadcasts it:

    tokens [b, s] -> stage 0 --[n, h]--> stage 1 --[n, h]--> last stage -> logits [b, V] -> tokens [b] -> every rank
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from megazero.comm.mesh import ACTIVATIONS, Mesh, gather_json
from megazero.config.run import RunConfig
from megazero.errors import CheckpointError, ConfigError, Problem, first_line
from megazero.generate.choice import choose, whole_rows
from megazero.generate.model_layout import padded_rows, stage_chunks
from megazero.generate.sampling import Sampling, generator_of
from megazero.model.gpt import GPT
from megazero.model.key_value_cache import KeyValueCache
from megazero.model.sequences import Sequences
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


# What ended a text: the end-of-document token, the caller's rule, or the most new tokens.
End = Literal["eod", "stop", "length"]


class Continuation(NamedTuple):
    """The new tokens of a text, without the end-of-document token, and what ended it."""

    tokens: list[int]
    end: End


class _Ends(NamedTuple):
    """The conditions that end a text; see `Session.generate`."""

    max_new_tokens: int
    eod: int | None
    rule: Callable[[Sequence[int], Sequence[int]], bool] | None


@dataclass(eq=False)
class _Text:
    """A text that is being continued."""

    prompt: list[int]
    generator: torch.Generator
    new: list[int] = field(default_factory=list)
    end: End | None = None

    def __len__(self) -> int:
        return len(self.prompt) + len(self.new)

    def add(self, token: int, ends: _Ends) -> None:
        """Add the token that was chosen, or end before it, or with it."""
        if token == ends.eod:
            self.end = "eod"
            return
        self.new.append(token)
        if ends.rule is not None and ends.rule(self.prompt, self.new):
            self.end = "stop"
        elif len(self.new) == ends.max_new_tokens:
            self.end = "length"


class Session:
    """A model to generate with: this rank's one chunk of it.

    Every method is collective: all ranks of the mesh call it with the same arguments.
    """

    def __init__(self, model: GPT, mesh: Mesh) -> None:
        assert len(model.chunks) == 1, "a stage has one chunk: it runs once for a token"
        self.model = model.eval()
        self._mesh = mesh

    @torch.inference_mode()
    def next_logits(self, tokens: Tensor) -> Tensor | None:
        """Return the logits [b, V] of the token after tokens [b, any length]; None before the last stage.

        The last tokens, as many as the model has positions, are computed; there is no cache.
        """
        window = tokens[:, -self.model.max_positions :]
        x = self._run_layers(window, self.model.sequences(window.shape[1]))
        return None if x is None else self._logits(x.view(*window.shape, -1)[:, -1])

    @torch.inference_mode()
    def first_logits(self, texts: Sequence[Sequence[int]], cache: KeyValueCache) -> Tensor | None:
        """Read new texts into the cache; return what `next_logits` does of each.  They have a token or more."""
        lengths = [len(text) for text in texts]
        longest = max(lengths)
        # What is behind a text's last token changes nothing before it.
        tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
        x = self._run_layers(tokens, self.model.first_tokens(longest, cache))
        cache.add(lengths)
        if x is None:
            return None
        last = torch.tensor(lengths, device=x.device) - 1
        return self._logits(x.view(*tokens.shape, -1)[torch.arange(len(texts), device=x.device), last])

    @torch.inference_mode()
    def more_logits(self, tokens: Sequence[int], cache: KeyValueCache) -> Tensor | None:
        """Add a token to each text that the cache holds; return what `next_logits` does of each."""
        x = self._run_layers(torch.tensor(tokens).unsqueeze(1), self.model.next_tokens(cache))
        cache.grow()
        return None if x is None else self._logits(x)

    @torch.inference_mode()
    def last_layer(self, tokens: Tensor) -> Tensor | None:
        """Return the last layer's output [b s, h] for tokens [b, s <= max_positions]; None before the last stage."""
        return self._run_layers(tokens, self.model.sequences(tokens.shape[1]))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Sampling,
        max_new_tokens: int,
        num_samples: int = 1,
        seed: int = 0,
        eod: int | None = None,
        ends: Callable[[Sequence[int], Sequence[int]], bool] | None = None,
        batch_size: int = 8,
        notice: Callable[[str], None] | None = None,
    ) -> list[list[Continuation]]:
        """Continue every prompt (at least one id) num_samples times, batch_size texts at the same time.

        eod: the id before which a continuation ends.  ends: whether it ends with its last token, from the prompt and
        the new tokens.  Neither batch_size nor the other prompts change what is drawn for a prompt.  notice: takes a
        line about the memory of the cache.
        """
        assert all(prompts), "a prompt has at least one token"
        samples = [[_Text(list(prompt), generator_of(seed, n)) for n in range(num_samples)] for prompt in prompts]
        waiting = deque(text for texts in samples for text in texts)
        rows, limits = min(batch_size, len(waiting)), _Ends(max_new_tokens, eod, ends)
        cache = self.cache(rows, max(map(len, prompts), default=0) + max_new_tokens)
        if notice is not None:
            notice(cache.describe())
        cached: list[_Text] = []
        longer: list[_Text] = []
        while waiting or cached or longer:
            taken = [waiting.popleft() for _ in range(min(rows - len(cached) - len(longer), len(waiting)))]
            held = [*cached, *(text for text in taken if self._fits(text))]
            longer += [text for text in taken if not self._fits(text)]
            logits = self._logits_of(held, len(cached), longer, cache)
            tokens = choose(self._mesh, logits, sampling, [text.generator for text in (*held, *longer)])
            for text, token in zip((*held, *longer), tokens, strict=True):
                text.add(token, limits)
            kept = [row for row, text in enumerate(held) if text.end is None and self._fits(text)]
            cache.keep(kept)
            longer = [text for text in (*held, *longer) if text.end is None and not self._fits(text)]
            cached = [held[row] for row in kept]
        return [[Continuation(text.new, text.end or "length") for text in texts] for texts in samples]

    def _fits(self, text: _Text) -> bool:
        return len(text) <= self.model.max_positions

    def _logits_of(
        self, held: Sequence[_Text], num_cached: int, longer: Sequence[_Text], cache: KeyValueCache
    ) -> Tensor | None:
        """Return the next tokens' logits [b, V]: of texts cached but for their last tokens, of new and longer ones."""
        cached, fresh = held[:num_cached], held[num_cached:]
        found = []
        if cached:
            found.append(self.more_logits([text.new[-1] for text in cached], cache))
        if fresh:
            found.append(self.first_logits([text.prompt for text in fresh], cache))
        if longer:
            most = self.model.max_positions
            found.append(self.next_logits(torch.tensor([[*text.prompt, *text.new][-most:] for text in longer])))
        known = [logits for logits in found if logits is not None]
        return torch.cat(known) if known else None

    def cache(self, rows: int, tokens: int) -> KeyValueCache:
        """Allocate a cache for texts of so many tokens, or of as many as the model has positions.

        Raises ConfigError where memory is short.
        """
        positions = min(tokens, self.model.max_positions)
        try:
            return self.model.new_cache(rows=rows, positions=positions)
        except RuntimeError as error:  # of torch's allocators
            given = f"{rows} texts of {positions} tokens at the same time"
            rule = f"their keys and values have room in memory: {first_line(error)}"
            raise ConfigError(Problem(given, rule, "a smaller --batch-size or --max-new-tokens")) from error

    def _logits(self, x: Tensor) -> Tensor:
        """Return the logits [b, V] of the last layer's outputs [b, h]."""
        return whole_rows(self.model.logits(self.model.final_norm(x)), self._mesh.axis("tp"), self.model.vocab_size)

    def _run_layers(self, tokens: Tensor, sequences: Sequences) -> Tensor | None:
        """Run this rank's layers, in its turn, on tokens [b, s]; return [n, h], or None before the last stage."""
        model, chunk, stage = self.model, self.model.chunks[0], self._mesh.coordinate("pp")
        if chunk.is_first:
            x = model.embed(tokens.to(self._mesh.device), sequences)
        else:
            x = torch.empty(model.activation_shape(tokens.numel()), dtype=model.dtype, device=self._mesh.device)
            self._mesh.channel(ACTIVATIONS, link=stage - 1).receive_into(x, stage - 1).wait()
        x = model.through(0, x, sequences)
        if chunk.is_last:
            return x
        self._mesh.channel(ACTIVATIONS, link=stage).send(x.contiguous(), stage + 1).wait()
        return None


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
