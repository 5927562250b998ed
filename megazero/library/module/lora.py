"""Adapters for a user's module: LoRA beside its linear layers, of the kind that a run has (`tensor_parallel/adapters`).

A layer keeps its place, its class and the names of its parameters; its adapter is a submodule, whose output a forward
hook adds to the layer's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from megazero.errors import ConfigError, Problem, raise_problems
from megazero.tensor_parallel.adapters import Adapter, first_std, is_adapters, merged, train_adapters_alone

_THIN, _OTHER = ".adapter.lora_A.weight", ".adapter.lora_B.weight"


def lora(
    model: nn.Module,
    *,
    rank: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: Sequence[str] = (),
) -> list[str]:
    """Give linear layers of a module adapters, freeze all its other parameters, and return the layers' names.

    Call it before `megazero.initialize`.  alpha: an adapter's product is multiplied by alpha / rank; None: by 1.
    dropout: of an adapter's input.  targets: last parts of layers' names, such as "q_proj" or "mlp.up"; empty: every
    `nn.Linear`.

    A's first values are drawn from torch's default generator; `initialize` takes those of rank 0.
    Raises ConfigError for a target that no `nn.Linear` has, and for a module that has adapters already.
    """
    problems = []
    if rank < 1 or not 0 <= dropout < 1 or (alpha is not None and not alpha > 0):
        rule = "the rank is at least 1, alpha above 0, and dropout at least 0 and below 1"
        problems.append(Problem(f"lora(rank={rank}, alpha={alpha}, dropout={dropout})", rule))
    if any(isinstance(module, Adapter) for module in model.modules()):
        problems.append(Problem("lora(model)", "a module has its adapters once; this one has some", "a new module"))
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    chosen = {name: layer for name, layer in linears.items() if not targets or _is_meant(name, targets)}
    unmet = [target for target in targets if not any(_is_meant(name, [target]) for name in linears)]
    if unmet or not chosen:
        endings = sorted({name.rpartition(".")[2] for name in linears})
        given = f"lora(targets={list(unmet or targets)!r})"
        problems.append(Problem(given, "a target ends the name of an nn.Linear of the module", ", ".join(endings)))
    raise_problems(ConfigError, problems)
    scale = 1.0 if alpha is None else alpha / rank
    for layer in chosen.values():
        kind: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.weight.dtype, "bias": False}
        first, second = nn.Linear(layer.in_features, rank, **kind), nn.Linear(rank, layer.out_features, **kind)
        nn.init.normal_(first.weight, std=first_std(layer.in_features))
        nn.init.zeros_(second.weight)
        layer.adapter = Adapter(first, second, scale=scale, dropout=nn.Dropout(dropout))
        layer.register_forward_hook(_add_adapter)
    train_adapters_alone(model)
    return list(chosen)


def merge_lora(state: Mapping[str, Tensor], *, alpha: float | None = None) -> dict[str, Tensor]:
    """Return the state of the module without adapters that computes the same: W + (alpha / rank) B A.

    state: whole tensors by name, as a saved model has them.  Sums are of float32 or wider, rounded to the weight's
    dtype.  alpha: as for `lora`.
    """
    plain = {name: value for name, value in state.items() if not is_adapters(name)}
    for name in (name for name in state if name.endswith(_THIN)):
        layer = name.removesuffix(_THIN)
        weight, thin, other = (state[f"{layer}{end}"] for end in (".weight", _THIN, _OTHER))
        scale = 1.0 if alpha is None else alpha / thin.shape[0]
        plain[f"{layer}.weight"] = merged(weight, thin, other, scale).to(weight.dtype)
    return plain


def _is_meant(name: str, targets: Sequence[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _add_adapter(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    added: Tensor = layer.get_submodule("adapter")(inputs[0])
    return output + added
