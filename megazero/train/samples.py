"""Text that a model in training continues at evaluations, on whatever layout the run has.

A token takes one forward pass of a micro-batch of the run's own shape on every rank, through the same actions as an
evaluation, so that every layout, ZeRO stage and pipeline schedule is served; there is no cache of keys and values.  The
ranks of the last pipeline stage have the logits; one of them draws the token and broadcasts it to all:

    window [b, s] -> evaluation's forwards -> logits [V] of the text's last token -> a token -> every rank
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.data.loader import MicroBatch
from megazero.generate.sampling import Sampling, next_tokens
from megazero.pipeline.runtime import execute
from megazero.train.attention_kernel import prefer_kernel
from megazero.train.context import StepContext
from megazero.train.stage_passes import StagePasses

PROMPT_TOKENS = 16
# Enough randomness for a text that does not repeat itself, and little enough for one that stays likely.
_SAMPLING = Sampling(temperature=0.8, top_p=0.95)


@dataclass(frozen=True)
class SampledText:
    """The text to generate at every evaluation.

    prompt: its first tokens.  shape: of a micro-batch, (b, s).  decode: None on ranks that do not print.
    """

    prompt: Sequence[int]
    num_tokens: int
    shape: tuple[int, int]
    vocab_size: int
    seed: int
    decode: Callable[[Sequence[int]], str] | None


class _LogitsPasses(StagePasses):
    """The forwards of an evaluation that keep the logits of one token in place of the losses.

    token: its place in the flattened micro-batch.  logits: [Vp / t], None before the last stage.
    """

    token: int
    logits: Tensor | None = None

    def _losses(self, x: Tensor, batch: MicroBatch) -> Tensor:
        self.logits = self._model.logits_of(x, self.token)
        return x.new_zeros(())


@torch.no_grad()
def continue_text(context: StepContext, text: SampledText) -> list[int]:
    """Return the tokens that follow the prompt, the same on every rank; a collective call."""
    mesh, (rows, length) = context.mesh, text.shape
    generator = torch.Generator().manual_seed(text.seed)
    chooser = mesh.topology.rank_of(pp=mesh.topology.pp - 1)
    tokens = list(text.prompt)
    context.model.train(False)
    for _ in range(text.num_tokens):
        window = tokens[-length:]
        # What is behind the last token changes nothing before it.
        inputs = torch.tensor(window + [0] * (length - len(window))).repeat(rows, 1)
        actions = context.plan.evaluation(1)
        passes = _LogitsPasses(context, [MicroBatch(0, inputs, inputs, None)], actions)
        passes.token = len(window) - 1
        with prefer_kernel(context.attention):
            execute(actions, passes)
            passes.finish()
        chosen = torch.zeros(1, dtype=torch.int64, device=mesh.device)
        if passes.logits is not None:
            whole = _whole(context, passes.logits)[:, : text.vocab_size]
            chosen = next_tokens(whole, _SAMPLING, generator).to(mesh.device)
        mesh.world.broadcast(chosen, chooser).wait()
        tokens.append(int(chosen.item()))
    context.model.train(True)
    return tokens[len(text.prompt) :]


def _whole(context: StepContext, logits: Tensor) -> Tensor:
    """Gather this rank's logits [Vp / t] to the whole row, [1, Vp]."""
    tp = context.mesh.axis("tp")
    row = logits.new_empty(tp.size * logits.numel())
    tp.all_gather_into(row, logits.contiguous()).wait()
    return row.unsqueeze(0)
