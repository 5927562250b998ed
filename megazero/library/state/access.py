"""Read and change the state of a parameter that an engine owns: fp32 weights, gradient, optimizer state.

The functions take any parameter of a model that an engine was made for, at every ZeRO stage.  *Full* forms are about
the whole parameter (with tensor parallelism: this process's slice).  They are collective calls, which every
data-parallel rank makes with the same parameter and, for setters, the same value.  *Local* forms are about the elements
that this rank owns: its pieces one after the other, one-dimensional, often none.

Weights are master weights; a change reaches the working parameters at once, so `safe_set_local_*` of weights is a
collective call too.  Gradients are those of the step so far: summed over its micro-batches, averaged over ranks and
over all micro-batches of a step, without loss scale; local forms and setters have them after the step's last backward
only.  State is a tensor with one value per element, such as "exp_avg".

Getters return copies in the master weights' number format.  They return None where there is no such state: for frozen
parameters, for gradients before a step's first backward, for state before the optimizer's first step.  There setters
raise UsageError, as for a value of another shape.  Both raise it if no engine owns the parameter, or if the optimizer
has no such state.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megazero.errors import Problem, UsageError
from megazero.optim.inner import Elementwise
from megazero.zero.engine import Engine
from megazero.zero.parameters.guard import handle_of
from megazero.zero.plan import Placement
from megazero.zero.update import Piece

_MASTER, _GRADIENT = "master", "gradient"


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Get the master weights of a parameter, in its shape; a collective call."""
    return _State(param, _MASTER).get_full()


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Get the gradient of a parameter, in its shape; a collective call."""
    return _State(param, _GRADIENT).get_full()


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Get the optimizer state of this key, in the parameter's shape; a collective call."""
    return _State(param, _checked_key(param, optim_state_key)).get_full()


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Change the master weights of a parameter, and the working parameter with them; a collective call."""
    _State(param, _MASTER).set_full(value)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Change the gradient of a parameter; a collective call."""
    _State(param, _GRADIENT).set_full(value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Change the optimizer state of this key; a collective call."""
    _State(param, _checked_key(param, optim_state_key)).set_full(value)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Get this rank's master weights of a parameter, [elements owned]."""
    return _State(param, _MASTER).get_local()


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Get this rank's gradient of a parameter, [elements owned]; a collective call while reductions are in flight."""
    return _State(param, _GRADIENT).get_local()


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Get this rank's optimizer state of this key, [elements owned]."""
    return _State(param, _checked_key(param, optim_state_key)).get_local()


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Change this rank's master weights of a parameter, [elements owned]; a collective call."""
    _State(param, _MASTER).set_local(value)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Change this rank's gradient of a parameter, [elements owned]."""
    _State(param, _GRADIENT).set_local(value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Change this rank's optimizer state of this key, [elements owned]."""
    _State(param, _checked_key(param, optim_state_key)).set_local(value)


class _State:
    """One kind of state of one parameter: "master", "gradient", or the optimizer's name of a state."""

    def __init__(self, param: nn.Parameter, kind: str) -> None:
        self._engine, self._name = _engine_of(param)
        self._param, self._kind = param, kind
        if kind == _GRADIENT:
            self._engine.finish_reductions()
        self._scale = self._engine.gradient_scale if kind == _GRADIENT else 1.0
        is_trained = _is_trained(self._engine, self._name)
        self._has_state = is_trained and (kind != _GRADIENT or self._engine.has_gradients)

    def get_full(self) -> Tensor | None:
        if self._kind == _GRADIENT and not self._engine.has_gradients:
            return self._get_gradient_so_far()
        if (whole := self._whole()) is not None:
            return whole.clone()
        if not self._exists():
            return None
        full = self._zeros(self._param.numel())
        for start, stop, piece in self._pieces():
            full[start:stop].copy_(piece).mul_(self._scale)
        if self._is_partitioned:
            self._engine.partition.all_reduce(full).wait()
        return full.view(self._param.shape)

    def _get_gradient_so_far(self) -> Tensor | None:
        """Get the gradient of a step that awaits more passes."""
        so_far = self._engine.gradient_so_far(self._name) if _is_trained(self._engine, self._name) else None
        if so_far is None:
            return None
        full = self._zeros(self._param.numel())
        for start, stop, piece in so_far.pieces:
            full[start:stop].copy_(piece)
        for axis in ("dp", *so_far.summed_over):
            self._engine.mesh.axis(axis).all_reduce(full).wait()
        return full.mul_(self._scale / so_far.divisor).view(self._param.shape)

    def set_full(self, value: Tensor) -> None:
        if (whole := self._whole()) is not None:
            self._check_shape(value, tuple(whole.shape))
            whole.copy_(value.detach())
            return
        self._check_exists(self._exists())
        self._check_shape(value, tuple(self._param.shape))
        self._write(value.detach().reshape(-1), ((piece, piece.start) for piece in self._pieces()))

    def get_local(self) -> Tensor | None:
        if (whole := self._whole()) is not None:
            return whole.flatten().clone()
        if not self._exists_locally():
            return None
        pieces = [piece.tensor for piece in self._pieces()]
        return torch.cat([self._zeros(0), *pieces]).mul_(self._scale)

    def set_local(self, value: Tensor) -> None:
        if (whole := self._whole()) is not None:
            self._check_shape(value, (whole.numel(),))
            whole.view(-1).copy_(value.detach())
            return
        self._check_exists(self._exists_locally())
        pieces = self._pieces()
        self._check_shape(value, (sum(piece.tensor.numel() for piece in pieces),))
        starts = [sum(piece.tensor.numel() for piece in pieces[:index]) for index in range(len(pieces))]
        self._write(value.detach(), zip(pieces, starts, strict=True))

    def _write(self, value: Tensor, starts: Iterable[tuple[Piece, int]]) -> None:
        """Fill each piece with the value's elements from its start on."""
        if self._kind == _MASTER:
            self._engine.check_may_write([self._name], f"setting the master weights of {self._name}")
        for piece, start in starts:
            piece.tensor.copy_(value[start : start + piece.tensor.numel()] / self._scale)
        if self._kind == _MASTER:
            self._engine.republish(self._name)
        elif self._kind == _GRADIENT:
            self._engine.count_gradient(self._name)

    def _whole(self) -> Tensor | None:
        """Return state that is not of elements, which every rank has all of; None of other kinds."""
        return None if self._kind in (_MASTER, _GRADIENT) else self._engine.whole_state(self._name).get(self._kind)

    def _pieces(self) -> list[Piece]:
        return list(self._engine.pieces(self._name, self._kind))

    @property
    def _is_partitioned(self) -> bool:
        return self._engine.plan.optimizer.placement is Placement.PARTITIONED

    def _exists(self) -> bool:
        """True if every element has such state, on any rank."""
        if not self._has_state or self._kind in (_MASTER, _GRADIENT):
            return self._has_state
        found = torch.tensor(sum(piece.tensor.numel() for piece in self._pieces()), device=self._param.device)
        if self._is_partitioned:
            self._engine.partition.all_reduce_scalars(found).wait()
        return int(found) == self._param.numel()

    def _exists_locally(self) -> bool:
        """True if every element that this rank owns has such state."""
        return self._has_state and len(self._pieces()) == self._engine.num_pieces(self._name)

    def _check_exists(self, exists: bool) -> None:
        if not exists:
            given = f"setting the {self._kind} of parameter {self._name}"
            rule = (
                "there is none: it is frozen, or a step's last backward or the optimizer's first step has yet to come"
            )
            raise UsageError(Problem(given, rule, "set it later; GatheredParameters for frozen parameters"))

    def _check_shape(self, value: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(value.shape) != shape:
            given = f"a value of shape {tuple(value.shape)} for the {self._kind} of parameter {self._name}"
            raise UsageError(Problem(given, "values are set in the shape in which they are got", str(shape)))

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=self._engine.plan.optimizer.dtype, device=self._param.device)


def _engine_of(param: nn.Parameter) -> tuple[Engine, str]:
    """Return the engine that owns the parameter, and the parameter's name there; raise UsageError if there is none."""
    handle = handle_of(param)
    if handle is None or not isinstance(handle.owner, Engine):
        given = f"a parameter of shape {tuple(param.shape)} without an engine"
        legal = "a parameter of the model given to megazero.initialize, after that call"
        raise UsageError(Problem(given, "an engine keeps the state that is asked for", legal))
    return handle.owner, handle.name


def _is_trained(engine: Engine, name: str) -> bool:
    slots = (slot for section in engine.layout.sections for slot in section.slots)
    return next(slot.spec.trainable for slot in slots if slot.spec.name == name)


def _checked_key(param: nn.Parameter, key: str) -> str:
    """Return the key if the parameter's optimizer has such state from its first step on; raise UsageError if not."""
    engine, name = _engine_of(param)
    inner = engine.settings.optimizer
    keys = (*inner.moments, *engine.whole_state(name))
    if isinstance(inner, Elementwise):
        group = inner.optimizer.group_of(param)
        keys = () if group is None else inner.optimizer.state_names(group)
    if key not in keys and _is_trained(engine, name):
        given = f"optimizer state {key!r} of parameter {name}"
        raise UsageError(Problem(given, "the optimizer keeps no such state", ", ".join(keys) or "none at all"))
    return key
