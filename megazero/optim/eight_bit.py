"""Adam and Lion with moments in 8 bits, by the kernels of bitsandbytes, on CPUs and GPUs.

The package is optional, and is imported when such an optimizer is made.  One call of a kernel updates weights and
moments of whole blocks, of which the layout gives every parameter its own; so an update does not depend on how ZeRO
cuts parameters.  It computes in fp32.
"""

import importlib
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megazero.memory.lease import Scratch
from megazero.optim.grouping import Grouping
from megazero.optim.inner import ElementRun, OfEngine, StepInputs, piece_numel, scaled

# {name in the table of optimizers: that of the kernel, and whether the values of each of its moments have signs}
KERNELS: Mapping[str, tuple[str, Mapping[str, bool]]] = MappingProxyType(
    {
        "AdamW8bit": ("adam", {"exp_avg": True, "exp_avg_sq": False}),
        "Adam8bit": ("adam", {"exp_avg": True, "exp_avg_sq": False}),
        "Lion8bit": ("lion", {"exp_avg": True}),
    }
)


class EightBit(OfEngine):
    """An optimizer of bitsandbytes; weight decay is decoupled, in its Adam too.

    The host counts steps and skips them, so each update on a GPU waits for the device once.
    """

    skips_on_host = True

    def __init__(self, kind: str, params: Mapping[str, Any], grouping: Grouping | None = None) -> None:
        """kind, params: by the names of the table of optimizers."""
        common = {name: value for name, value in params.items() if name != "weight_decay"}
        super().__init__(common, params["weight_decay"], grouping or Grouping())
        self._name, signs = KERNELS[kind]
        self.moments = self.kinds = tuple(signs)
        # The package warns of kernels for products of 4 bits that it does not find.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        with _disable_current_modes():  # it makes tensors when it is imported; values, where other tensors have none
            functional: Any = importlib.import_module("bitsandbytes.functional")
            self.code_values = {name: functional.create_dynamic_map(signed=signed) for name, signed in signs.items()}
        self._kernel: Callable[..., None] = functional.optimizer_update_8bit_blockwise

    def update(self, index: int, run: ElementRun, step: Tensor, inputs: StepInputs, *, buffers: Scratch) -> None:
        options = self.groups[run.group] if inputs.options is None else inputs.options[run.group]
        lr, count = float(options["lr"] if inputs.lr is None else inputs.lr), int(step.item())
        numel, piece = run.master.numel(), piece_numel(run)
        lease = buffers.lease(piece, run.master.dtype)
        for start in range(0, numel, piece):
            part = run.part(start, min(start + piece, numel))
            self._update_piece(part, scaled(part.gradient, inputs.factor, lease.tensor), count, lr, options)
        lease.release()

    def _update_piece(
        self, run: ElementRun, gradient: Tensor, count: int, lr: float, options: Mapping[str, Any]
    ) -> None:
        first, second = (run.blocks.get(kind) for kind in ("exp_avg", "exp_avg_sq"))
        assert first is not None, "every kernel has a first moment"
        beta1, beta2 = options["betas"]
        self._kernel(
            self._name,
            gradient,
            run.master,
            first.codes,
            None if second is None else second.codes,
            beta1,
            beta2,
            0.0,
            0.0,
            options.get("eps", 0.0),
            count,
            lr,
            first.values,
            None if second is None else second.values,
            first.maxima,
            None if second is None else second.maxima,
            options["weight_decay"],
        )
