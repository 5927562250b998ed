"""Delayed scaling: the scales of 8-bit numbers follow from the maxima of earlier steps, not from the tensor itself.

A product then rounds its operands without searching for their maxima first; the maximum that it finds beside counts
for later steps.  The rule is that of NVIDIA's TransformerEngine, once a step, with M the format's largest number:

    history   the maxima of the last steps [steps, tensors], the newest first
    amax      the newest maximum ("most_recent"), or the largest of the history ("max")
    scale     M / amax / 2^margin; where amax is 0, the scale before
    q         x scale, limited to [-M, M], rounded to 8 bits

A maximum is that of the whole tensor, over all micro-batches of a step: one all-reduce over all ranks at the end of the
step, of 12 fp32 figures a layer of the model.  Infinities and NaNs do not count.  So every layout rounds by the same
scales.  The history of all layers is on every rank, and in every checkpoint, whatever the layout.  A step that is
skipped leaves it as it was.

Before the first maximum is known a scale is 1; that of gradients is the number of tokens by which the loss is divided,
without which most of the first step's gradients would be rounded to 0.
"""

import base64
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero.comm.interface import Communicator
from megazero.config.engine_sections import AmaxAlgorithm
from megazero.errors import DamageError, Problem
from megazero.memory.ledger_interface import AnyLedger, NullLedger
from megazero.tensor_parallel.float8 import E4M3, GRADIENT, INPUT, Float8Products, LayerScales

PROGRESS_KEY = "fp8_scales"
_KINDS = 3  # tensors of a layer: input, weight, gradient
# Numbers of a layer lie so many apart: cuBLAS refuses the address of a scale that is not aligned, and torch's compiler
# copies such an input, so that what a kernel writes there would be lost.
_APART = 128


class DelayedRecipe(NamedTuple):
    """The settings of delayed scaling; first_gradient_scale: the scale of gradients before the first maximum."""

    margin: int
    history_len: int
    algorithm: AmaxAlgorithm
    first_gradient_scale: float = 1.0


def following_scales(history: Tensor, scales: Tensor, largest: Tensor, recipe: DelayedRecipe) -> Tensor:
    """Return the scales [tensors] that follow from a history [steps, tensors] and the scales before.

    largest [tensors]: the largest number of each tensor's format.
    """
    amax = history[0] if recipe.algorithm == "most_recent" else history.amax(0)
    found = (largest / amax / 2.0**recipe.margin).nan_to_num()  # an amax next to 0 makes it infinite
    return torch.where(amax > 0, found, scales)


class DelayedScales:
    """The scales and the history of all layers of a model, the same on every rank."""

    def __init__(
        self,
        layers: Mapping[int, Float8Products],
        recipe: DelayedRecipe,
        *,
        num_layers: int,
        world: Communicator,
        device: torch.device,
        ledger: AnyLedger | None = None,
    ) -> None:
        """Let products round by delayed scales.

        layers: those of this rank by their number among the model's num_layers linear layers; there is at least one.
        """
        self._recipe, self._world = recipe, world
        gradients = next(iter(layers.values())).gradients
        row = torch.tensor([torch.finfo(dtype).max for dtype in (E4M3, E4M3, gradients)], device=device)
        self._largest = row.repeat(num_layers)
        self.history = torch.zeros(recipe.history_len, num_layers * _KINDS, device=device)
        self.scales = torch.tensor([1.0, 1.0, recipe.first_gradient_scale], device=device).repeat(num_layers)
        self._rows = torch.tensor(list(layers), device=device)
        own = torch.zeros(3, len(layers), _KINDS, _APART, device=device)
        self._own_scales, self._reciprocals, self._maxima = own[..., 0].unbind()
        for index, products in enumerate(layers.values()):
            products.scales = LayerScales(self._own_scales[index], self._reciprocals[index], self._maxima[index])
        self._publish()
        for tensor in (self._largest, self.history, self.scales, self._rows, own):
            (ledger or NullLedger()).tag(tensor, "parameters")

    def begin_step(self) -> None:
        """Forget the maxima that evaluations have found, but for those of weights, which are the same in the step."""
        self._maxima[:, INPUT].zero_()
        self._maxima[:, GRADIENT].zero_()

    def end_step(self, skipped: Tensor | None) -> None:
        """Enter the step's maxima into the history, and set the scales of the next one; a collective call.

        skipped: not 0 if the step was not taken, which leaves everything as it was; None: it was.
        """
        own = self._maxima.nan_to_num(nan=0.0, posinf=0.0)
        maxima = torch.zeros_like(self.scales).view(-1, _KINDS).index_copy_(0, self._rows, own).view(-1)
        self._world.all_reduce_scalars(maxima, "max").wait()
        history = torch.cat([maxima[None], self.history[:-1]])
        scales = following_scales(history, self.scales, self._largest, self._recipe)
        if skipped is not None:
            history = torch.where(skipped > 0, self.history, history)
            scales = torch.where(skipped > 0, self.scales, scales)
        self.history.copy_(history)
        self.scales.copy_(scales)
        self._publish()

    def _publish(self) -> None:
        """Copy the scales to the layers, and forget the maxima of the step."""
        rows = self.scales.view(-1, _KINDS).index_select(0, self._rows)
        self._own_scales.copy_(rows)
        self._reciprocals.copy_(rows.reciprocal())
        self._maxima.zero_()

    def to_json(self) -> dict[str, Any]:
        """Return scales and history as a checkpoint stores them."""
        values = torch.cat([self.scales[None], self.history]).cpu()
        text = base64.b64encode(zlib.compress(values.numpy().tobytes())).decode()
        return {"history_len": len(self.history), "tensors": values.shape[1], "fp32": text}

    def restore(self, saved: object) -> None:
        """Take scales and history from a checkpoint, as many of its newest steps as the history here holds.

        Raises DamageError if they are not those of this model.
        """
        values = _values(saved, len(self.scales), most_steps=len(self.history)).to(self.scales.device)
        num_steps = min(len(values) - 1, len(self.history))
        self.scales.copy_(values[0])
        self.history.zero_()
        self.history[:num_steps] = values[1 : num_steps + 1]
        self._publish()


def _values(saved: Any, num_tensors: int, *, most_steps: int) -> Tensor:
    """Return a checkpoint's scales and, below them, its newest history [1 + steps, tensors], most_steps at most."""
    try:
        tensors, num_rows = int(saved["tensors"]), 1 + min(max(int(saved["history_len"]), 1), most_steps)
        # No more is unpacked than is used: a few bytes of a stranger's file may stand for as much memory as there is.
        stored = zlib.decompressobj().decompress(base64.b64decode(saved["fp32"]), 4 * num_rows * num_tensors)
        values = torch.frombuffer(bytearray(stored), dtype=torch.float32)
    except (KeyError, TypeError, ValueError, RuntimeError, zlib.error) as error:
        given = f"the checkpoint's {PROGRESS_KEY}, {str(saved)[:200]}"
        rule = "it has the scales of 8-bit products and their history, packed"
        raise DamageError(Problem(given, rule, "another checkpoint")) from error
    fits = tensors == num_tensors and len(values) == num_rows * num_tensors
    if not (fits and values.isfinite().all() and (values[:num_tensors] > 0).all()):
        given = f"the checkpoint's {PROGRESS_KEY} of {tensors} tensors"
        rule = f"scales above 0 and finite maxima of the model's {num_tensors} tensors"
        raise DamageError(Problem(given, rule, "another checkpoint"))
    return values.view(num_rows, num_tensors)
