"""Text that a model in training continues at evaluations, on whatever layout the run has.

A token takes one forward pass of a micro-batch of the run's own shape on every rank, through the same actions as an
evaluation, so that every layout, ZeRO stage and pipeline schedule is served, and nothing is compiled for another shape;
so there is no cache of keys and values, with which a pass would have a token a row.  The token is chosen as
`megazero generate` chooses it (`generate/choice.py`):

    window [b, s] -> evaluation's forwards -> logits [Vp / t] of the text's last token -> a token -> every rank
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.data.loader import MicroBatch
from megazero.generate.choice import choose, whole_rows
from megazero.generate.sampling import Sampling
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
        mine = passes.logits
        whole = None if mine is None else whole_rows(mine.unsqueeze(0), mesh.axis("tp"), text.vocab_size)
        tokens += choose(mesh, whole, _SAMPLING, [generator])
    context.model.train(True)
    return tokens[len(text.prompt) :]
