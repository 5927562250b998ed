"""Tests the optimizer that a configuration selects: its kind, its groups, and the state that checkpoints keep."""

from dataclasses import replace
from typing import Any

from support.each import each
from torch import nn

from megazero.config.choices import OptimizerChoice
from megazero.config.optimizers import OPTIMIZERS
from megazero.config.param_groups import ParamGroup
from megazero.optim.configured import make_optimizer, patterns_of, saved_kinds
from megazero.optim.grouping import DECAYED
from megazero.optim.inner import Elementwise, FusedAdamW
from megazero.parallel.param_spec import named_specs


def choice(kind: str, **params: Any) -> OptimizerChoice:
    table = OPTIMIZERS[kind].params
    return OptimizerChoice(type=kind, lr=0.125, params={name: info.default for name, info in table.items()} | params)


def groups(chosen: OptimizerChoice, model: nn.Module) -> list[dict[str, Any]]:
    optimizer = make_optimizer(chosen, model)
    assert isinstance(optimizer, Elementwise)
    return optimizer.optimizer.template.param_groups


def test_plain_adamw_is_the_fused_kernel() -> None:
    optimizer = make_optimizer(choice("AdamW", betas=(0.5, 0.75), weight_decay=0.25), nn.Linear(2, 2))
    assert isinstance(optimizer, FusedAdamW) and optimizer.groups[DECAYED]["betas"][1] == 0.75
    assert optimizer.groups[DECAYED]["weight_decay"] == 0.25
    assert isinstance(make_optimizer(choice("AdamW", amsgrad=True), nn.Linear(2, 2)), Elementwise)


def test_weight_decay_is_for_what_decays() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    model[1].weight.requires_grad_(False)
    decayed, others = groups(choice("SGD", momentum=0.5, weight_decay=0.25), model)
    assert decayed["params"] == [model[0].weight] and others["params"] == [model[0].bias]
    assert (decayed["weight_decay"], others["weight_decay"], others["momentum"]) == (0.25, 0.0, 0.5)
    assert len(groups(choice("Rprop"), model)) == 2, "the groups are the same where nothing decays"
    assert len(groups(choice("Adamax"), nn.Linear(3, 2, bias=False))) == 1


PATTERNS = (ParamGroup("*.bias", lr=0.5), ParamGroup("1.*", weight_decay=0.5))


def test_groups_of_patterns_come_behind_the_others() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    for kind in ("SGD", "AdamW", "Lamb"):
        chosen = replace(choice(kind, weight_decay=0.25), param_groups=PATTERNS)
        optimizer = make_optimizer(chosen, model)
        found = {
            spec.name: (optimizer.options[group]["weight_decay"], patterns_of(chosen, model, optimizer).get(group))
            for spec, parameter in named_specs(model)
            for group in [optimizer.group_of(spec, parameter)]
        }
        assert found == {
            "0.weight": (0.25, None),
            "0.bias": (0.0, PATTERNS[0]),
            "1.weight": (0.5, PATTERNS[1]),
            "1.bias": (0.0, PATTERNS[0]),
            "2.weight": (0.25, None),
            "2.bias": (0.0, PATTERNS[0]),
        }


@each(
    ("chosen", "kinds"),
    [
        (choice("AdamW"), ("exp_avg", "exp_avg_sq")),
        (choice("AdamW", amsgrad=True), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
        (choice("SGD"), ()),
        (choice("SGD", momentum=0.5), ("momentum_buffer",)),
        (choice("Adagrad"), ("sum",)),
        (choice("RMSprop", centered=True), ("grad_avg", "square_avg")),
        (choice("Adafactor"), ()),  # averages of rows and columns are not of elements
        (choice("Adadelta"), ("acc_delta", "square_avg")),
        (choice("Lion"), ("exp_avg",)),
    ],
    ids=str,
)
def test_what_a_checkpoint_keeps(chosen: OptimizerChoice, kinds: tuple[str, ...]) -> None:
    assert sorted(saved_kinds(chosen)) == list(kinds)
