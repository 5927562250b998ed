"""Tests that an engine tells the length of a step's rows: to the program, and to a model whose forward takes it."""

import warnings
from typing import Any

import pytest
import torch
from support.each import each
from support.processes import run_ranks
from torch import Tensor, nn

import megazero
from megazero.deepspeed.data import InputSettings
from megazero.deepspeed.deepspeed_engine import DeepSpeedEngine
from megazero.errors import ConfigError

SECTION = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 2,
    "max_difficulty": 6,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [2, 4, 6], "max_step": [1, 2]},
}
BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}
METRIC = {
    "difficulty_type": "value",
    "clustering_type": "single_cluster",
    **{name: SECTION[name] for name in ("min_difficulty", "max_difficulty", "schedule_type", "schedule_config")},
}
EFFICIENCY = {
    "enabled": True,
    "data_sampling": {
        "enabled": True,
        "curriculum_learning": {"enabled": True, "curriculum_metrics": {"seqlen_truncate": METRIC}},
    },
}


class Cutting(nn.Module):
    """A model that cuts its rows itself, and records to what."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.lengths: list[int | None] = []

    def forward(self, x: Tensor, curriculum_seqlen: int | None = None) -> Tensor:
        self.lengths.append(curriculum_seqlen)
        return self.layer(x if curriculum_seqlen is None else x[:, :curriculum_seqlen]).square().mean()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def lengths_on_rank(rank: int) -> None:
    from support.processes import mesh_in_worker

    rows = torch.randn(2, 6, 3)
    for section in ({"curriculum_learning": SECTION}, {"data_efficiency": EFFICIENCY}):
        engine = megazero.initialize(Cutting(), {**BASE, **section}, mesh=mesh_in_worker(rank))
        told = []
        for _ in range(4):
            for _ in range(2):
                told.append(engine.curriculum_seqlen)
                engine.backward(engine(rows))
                engine.step()
        theirs = DeepSpeedEngine(engine, InputSettings(), config={**BASE, **section})
        assert theirs.curriculum_enabled_legacy() and theirs.curriculum_seqlen == 6
        assert theirs.curriculum_params_legacy() == section.get("curriculum_learning", False)
        assert not hasattr(theirs, "curriculum_scheduler_legacy")
        engine.eval()
        engine(rows)
        assert told == [2, 2, 4, 4, 6, 6, 6, 6] and engine.module.lengths == [*told, None]
        engine.close()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = megazero.initialize(Plain(), {**BASE, "curriculum_learning": SECTION}, mesh=mesh_in_worker(rank))
    assert any("Plain.forward takes no curriculum_seqlen" in str(each.message) for each in caught)
    engine.backward(engine(rows[:, : engine.curriculum_seqlen]))
    engine.close()


@pytest.mark.gloo
def test_the_program_and_the_model_are_told_the_length() -> None:
    run_ranks(1, lengths_on_rank)


@each(
    ("section", "given"),
    [
        ({"curriculum_learning": {**SECTION, "max_difficulty": 5}}, "difficulty 2 4 6"),
        ({"curriculum_learning": {**SECTION, "curriculum_type": "voc"}}, 'curriculum_type: "voc"'),
        ({"curriculum_learning": {**SECTION, "schedule_type": "custom"}}, 'schedule_type: "custom"'),
        (
            {"curriculum_learning": {**SECTION, "schedule_type": "fixed_linear", "schedule_config": {}}},
            "schedule_config.difficulty_step is missing",
        ),
        ({"curriculum_learning": SECTION, "data_efficiency": EFFICIENCY}, "curriculum_learning and"),
        (
            {
                "data_efficiency": {
                    "enabled": True,
                    "data_sampling": {
                        "enabled": True,
                        "curriculum_learning": {"enabled": True, "curriculum_metrics": {"vocabularyrarity": METRIC}},
                    },
                }
            },
            "vocabularyrarity",
        ),
    ],
)
def test_what_is_no_curriculum_by_length(section: dict[str, Any], given: str) -> None:
    with pytest.raises(ConfigError) as error:
        megazero.initialize(Plain(), {**BASE, **section})
    assert any(given in problem.given for problem in error.value.problems), error.value.problems
