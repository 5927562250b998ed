"""GatheredParameters: partitioned parameters made whole for the length of a block.

It serves to read weights, or to change them, outside a forward.  Entering and leaving are collective: every rank of the
data-parallel axis must do both, with the same parameters.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from megazero.comm.interface import Communicator
from megazero.errors import Problem, UsageError
from megazero.zero.parameters.guard import ParameterOwner, handle_of


class GatheredParameters:
    """A context manager inside whose block the parameters are whole on every rank.

    params: one parameter, several, or a module's; those that no engine partitions are left as they are.
    modifier_rank: the data-parallel rank whose changes every rank stores, master weights too, at the block's end;
    None: parameters are only read, and what is written into partitioned ones is lost, or with the configuration's
    enable_sanity_checks an error on every rank.
    fwd_module: a module whose forward reads the parameters, which are registered with it
    (`register_external_parameter`).  enabled: False makes the block do nothing.

    Raises CollectiveError when not all ranks enter, once the process group's timeout has passed.
    """

    def __init__(
        self,
        params: nn.Parameter | nn.Module | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._parameters = list(_parameters_of(params)) if enabled else []
        self._modifier_rank = modifier_rank
        if fwd_module is not None:
            for parameter in self._parameters:
                register_external_parameter(fwd_module, parameter)

    def __enter__(self) -> None:
        for owner, names in self._by_owner():
            why = f"GatheredParameters({', '.join(names)})"
            owner.gather(names, why, is_modified=self._modifier_rank is not None)

    def __exit__(self, *exc: object) -> None:
        modifier_rank = None if any(exc) else self._modifier_rank
        for owner, names in self._by_owner():
            try:
                if modifier_rank is None and not any(exc):
                    owner.check_unchanged(names)
            finally:
                owner.release(names, modifier_rank=modifier_rank)

    def _by_owner(self) -> list[tuple[ParameterOwner, list[str]]]:
        grouped: dict[int, tuple[ParameterOwner, list[str]]] = {}
        for parameter in self._parameters:
            handle = handle_of(parameter)
            if handle is not None:
                _, names = grouped.setdefault(id(handle.owner), (handle.owner, []))
                if handle.name not in names:
                    names.append(handle.name)
        return list(grouped.values())


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Gather `parameter`, which belongs to another module, whenever `module`'s forward begins.

    Without it such a parameter is found when it is touched, and gathered then.  Raises TypeError if it is no parameter.
    """
    if not isinstance(parameter, nn.Parameter):
        raise TypeError(f"register_external_parameter takes an nn.Parameter, not a {type(parameter).__name__}")
    handle = handle_of(parameter)
    if handle is not None:
        handle.owner.register_external(module, handle.name)


def raise_changes(changed: Mapping[str, bool], data_parallel: Communicator, device: torch.device) -> None:
    """Raise UsageError on every rank for parameters that one has changed in a block that only reads; collective.

    changed: the names of the block's parameters, the same on every rank; True for those that this rank has changed.
    """
    flags = torch.tensor([float(flag) for flag in changed.values()], dtype=torch.float64, device=device)
    data_parallel.all_reduce_scalars(flags, "max").wait()
    found = [name for name, flag in zip(changed, flags.tolist(), strict=True) if flag]
    if found:
        rule = "what is written into gathered parameters is lost, unless one rank is named whose values are stored"
        legal = "GatheredParameters(params, modifier_rank=0)"
        raise UsageError(Problem(f"{', '.join(found)} changed in GatheredParameters on some rank", rule, legal))


def _parameters_of(params: nn.Parameter | nn.Module | Iterable[nn.Parameter]) -> Iterable[nn.Parameter]:
    if isinstance(params, nn.Parameter):
        return [params]
    return params.parameters() if isinstance(params, nn.Module) else params
