"""The records that the library keeps of a step to name the cause of a gradient that is not finite.

The engine cannot repeat a step, whose loss the user computes.  It keeps the losses that were given to its backward
(references to scalars, which cost nothing), and watches the step after a bad one value by value: a program that repeats
the batch, or that overflows again, gets the module, the rank and the micro-batch of whatever is not finite.
"""

from torch import Tensor

from megazero.zero.engine import Engine
from megazero.zero.gradients.not_finite import Finding, Watch, cause_in_words, first_of_all
from megazero.zero.step import first_overflow

_UNKNOWN = (
    "the losses were finite on every rank, as far as engine.backward got them; the next step is watched value by value,"
    " and names the rank and the micro-batch if it has the same fault"
)


class StepRecords:
    """The losses of the step in progress and of the last one, and the watch of the step after a bad one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._losses: list[Tensor] = []
        self._last_losses: list[Tensor] = []
        self._watch: Watch | None = None

    def begin_forward(self, micro_batch: int, *, trains: bool) -> None:
        """Note the micro-batch of the forward that begins; trains: False if no backward follows."""
        if self._watch is not None:
            self._watch.micro_batch, self._watch.is_on = micro_batch, trains

    def add_loss(self, loss: Tensor) -> None:
        """Record the loss of the next micro-batch."""
        self._losses.append(loss.detach())

    def forget(self) -> None:
        """Forget the losses of a step that is discarded."""
        self._losses = []

    @property
    def losses(self) -> list[Tensor]:
        """The losses of the last step that has ended."""
        return self._last_losses

    def end_step(self) -> None:
        """Keep the losses of the step that ends until the end of the next one."""
        self._last_losses, self._losses = self._losses, []

    def watch(self) -> None:
        """Check every value from here on until `unwatch`, starting anew if that is done already."""
        self.unwatch()
        self._watch = Watch(self._engine.model, self._engine.units)

    def unwatch(self) -> None:
        """Check no more values."""
        if self._watch is not None:
            self._watch.close()
        self._watch = None

    def cause(self, overflow: int) -> str:
        """Return the cause of the last step's gradient that is not finite; a collective call.

        overflow: `ReducedGradients.first_overflow` of this rank.
        """
        engine = self._engine
        parameter = first_overflow(engine, overflow)
        found = self._first_loss() if self._watch is None else self._watch.found or self._first_loss()
        return cause_in_words(first_of_all(found, engine.mesh), parameter, otherwise=_UNKNOWN)

    def _first_loss(self) -> Finding | None:
        bad = (number for number, loss in enumerate(self._last_losses) if not bool(loss.isfinite().all()))
        number = next(bad, None)
        return None if number is None else Finding(number, False, 0, 0, "the loss", "")
