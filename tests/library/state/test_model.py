"""Tests that an engine's state_dict is its module's in every stage, and that loading one sets what trains."""

from typing import Any

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.errors import UsageError
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.library.state.access import safe_get_full_fp32_param


class Kept(nn.Module):
    """A model with an LSTM, tied and frozen weights, buffers, extra state, and a parameter once called gain."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(factor))
        self.register_buffer("scratch", torch.ones(4), persistent=False)
        self.note = "new"
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
        if f"{prefix}gain" in state:
            state[f"{prefix}scale"] = state.pop(f"{prefix}gain")

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(ids))
        return self.head(self.norm(hidden[:, -1])) * self.scale + self.frozen.sum()


def make(seed: int = 5) -> Kept:
    torch.manual_seed(seed)
    return Kept()


def engine_of(stage: int, precision: str, mesh: Any = None) -> DataParallelEngine:
    zero = {"zero_stage": stage, "reduce_bucket_size": 30}
    settings = {"zero": zero, "precision": {"precision": precision}, "optimizer": {"type": "AdamW", "lr": 0.01}}
    return megazero.initialize(make(), settings, mesh=mesh)


def train(engine: DataParallelEngine) -> None:
    ids = torch.arange(12).view(3, 4) % 7
    engine.backward(engine(ids).float().square().mean())
    engine.step()


def round_trip(rank: int, stage: int, precision: str) -> dict[str, Any]:
    engine = engine_of(stage, precision, mesh_in_worker(rank, dp=2))
    start, expected = engine.state_dict(), make().state_dict()
    assert list(start) == list(expected) and start["_extra_state"] == {"note": "new"}
    assert start._metadata.keys() == expected._metadata.keys()
    dtype = next(engine.module.parameters()).dtype
    for name, value in expected.items():
        if isinstance(value, Tensor) and not name.startswith("norm."):
            assert torch.equal(start[name], value.to(dtype)), name
    train(engine)
    other = {
        n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in make(9).state_dict().items()
    }
    other["gain"] = other.pop("scale")
    other["_extra_state"] = {"note": "loaded"}
    assert engine.load_state_dict(other) == ([], [])
    assert engine.module.note == "loaded"
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter)
        if master is not None:
            value = other["gain"] if name == "scale" else other[name]
            assert torch.equal(master, value.to(master.dtype)), f"{name}: master weights have all digits"
    found = {name: value for name, value in engine.state_dict().items() if isinstance(value, Tensor)}
    for name, value in found.items():
        wanted = other["gain" if name == "scale" else name]
        assert torch.equal(value, wanted.to(value.dtype)), name
    train(engine)  # the loaded weights train on, and the module is the engine's still
    moved = {name: value for name, value in engine.state_dict().items() if isinstance(value, Tensor)}
    assert not torch.equal(moved["lstm.weight_hh_l0"], other["lstm.weight_hh_l0"].to(dtype))
    assert torch.equal(moved["frozen"], found["frozen"])
    engine.close()
    return {name: value.clone() for name, value in moved.items()}


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "bf16"), (3, "fp64")])
def test_a_state_dict_is_whole_and_loading_it_counts(stage: int, precision: str) -> None:
    one, other = run_ranks(2, round_trip, stage, precision)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("stage", [1, 3])
def test_what_does_not_fit_is_torchs_error_and_changes_nothing(stage: int) -> None:
    engine = engine_of(stage, "fp32")
    before = {name: value.clone() for name, value in engine.state_dict().items() if isinstance(value, Tensor)}
    wrong = make(9).state_dict()
    del wrong["lstm.bias_hh_l0"]
    wrong["more"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*bias_hh_l0.*Unexpected key.*more"):
        engine.load_state_dict(wrong)
    wrong["embed.weight"] = torch.ones(2, 2)
    with pytest.raises(RuntimeError, match=r"size mismatch for embed\.weight"):
        engine.load_state_dict(wrong, strict=False)
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items() if name in before)
    del wrong["embed.weight"], wrong["head.weight"]
    found = engine.load_state_dict(wrong, strict=False)
    assert found.missing_keys == ["embed.weight", "lstm.bias_hh_l0", "head.weight"]
    assert found.unexpected_keys == ["more"]
    assert torch.equal(engine.state_dict()["embed.weight"], before["embed.weight"])
    assert not torch.equal(engine.state_dict()["lstm.weight_hh_l0"], before["lstm.weight_hh_l0"])
    train(engine)


def test_loading_while_parameters_are_gathered_is_refused() -> None:
    engine = engine_of(3, "fp32")
    with pytest.raises(UsageError, match="GatheredParameters"), megazero.zero.GatheredParameters(engine.module):
        engine.load_state_dict(make().state_dict())
