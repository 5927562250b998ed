"""Tests the safetensors file of a model: its library reads the values of the state_dict, and it is never partial."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from support.any_models import make
from support.processes import mesh_in_worker, run_ranks
from torch import nn

import megazero
from megazero.errors import CheckpointError
from megazero.library.module.units import choose_units
from megazero.library.state.access import safe_get_full_fp32_param
from megazero.library.state.save import contents


class Mixed(nn.Module):
    """A model with tied weights, a module under two names, buffers of several kinds, and numbers of every width."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.embed = nn.Embedding(7, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.BatchNorm1d(5)])
        self.alias = self.layers[0]
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.arange(3, dtype=torch.int8), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.register_buffer("scratch", torch.ones(4), persistent=False)
        self.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[1](self.layers[0](x))) * self.scalar


def make_mixed() -> Mixed:
    torch.manual_seed(4)
    return Mixed()


def config(stage: int, precision: str, **zero: bool) -> dict[str, object]:
    zero = {"zero_stage": stage, "reduce_bucket_size": 30, **zero}
    return {"zero": zero, "precision": {"precision": precision}, "optimizer": {"type": "SGD"}}


def save(rank: int, folder: str, stage: int, precision: str) -> tuple[bool, list[tuple[int, int]]]:
    model = make_mixed()
    engine = megazero.initialize(model, config(stage, precision), mesh=mesh_in_worker(rank, dp=2))
    done = engine.save_16bit_model(f"{folder}/new/one")
    engine.close()
    return done, [engine.zero_engine.gathered_numel]


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp16"), (1, "fp32"), (2, "bf16"), (3, "bf16"), (3, "fp64")])
def test_the_file_is_the_state(stage: int, precision: str, tmp_path: Path) -> None:
    outcomes = run_ranks(2, save, str(tmp_path), stage, precision)
    folder = tmp_path / "new" / "one"
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"], "nothing else is left"
    path = folder / "model.safetensors"
    dtype = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[precision]
    wide = torch.promote_types(dtype, torch.float32)  # of batch normalisation
    formats = {name: wide if name.startswith("layers.1.") else dtype for name in make_mixed().state_dict()}
    state = make_mixed().state_dict()
    expected = {name: v.to(formats[name]) if v.is_floating_point() else v for name, v in state.items()}
    aliases = {"head.weight": "embed.weight", "alias.weight": "layers.0.weight", "alias.bias": "layers.0.bias"}

    found = safetensors.torch.load_file(path)
    assert found.keys() == expected.keys() - aliases.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", **aliases}
    fresh = Mixed().to(dtype)
    assert safetensors.torch.load_model(fresh, path) == (set(), [])
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, expected[name].to(value.dtype)), name
    for done, ((live, most),) in outcomes:
        assert done and live == 0
        assert most == (64 if stage == 3 else 0), "one unit at a time: the largest one has 35 elements and padding"


def test_units_are_gathered_once_and_tensors_are_aligned() -> None:
    model = make("translator")
    model.register_buffer("odd", torch.ones(3, dtype=torch.uint8))
    model.register_buffer("wide", torch.ones(3, dtype=torch.int64))
    stored, aliases = contents(model, choose_units(model))
    widths = [item.tensor.element_size() for item in stored]
    assert widths == sorted(widths, reverse=True) and not aliases
    units = [item.unit for item in stored if isinstance(item.tensor, nn.Parameter)]
    assert units == sorted(units)
    assert [item.name for item in stored if item.unit < 0] == ["wide", "odd"]


def test_the_header_alone_says_where_everything_is(tmp_path: Path) -> None:
    engine = megazero.initialize(make_mixed(), config(0, "fp32"))
    engine.save_16bit_model(tmp_path, "weights.safetensors")
    raw = (tmp_path / "weights.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + length])
    table.pop("__metadata__")
    places = [entry["data_offsets"] for entry in table.values()]
    assert length % 8 == 0 and places[0][0] == 0 and places[-1][1] == len(raw) - 8 - length
    assert all(one[1] == other[0] for one, other in pairwise(places))


def refused(rank: int, folder: str) -> str:
    blocked = Path(folder) / "blocked"
    mesh = mesh_in_worker(rank, dp=2)
    engine = megazero.initialize(make_mixed(), config(3, "fp32"), mesh=mesh)
    with pytest.raises(CheckpointError) as disk:
        engine.save_16bit_model(blocked)
    engine.close()
    return str(disk.value)


@pytest.mark.gloo
def test_refusals_reach_every_rank(tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file where a folder should be")
    for disk in run_ranks(2, refused, str(tmp_path)):
        assert "blocked/model.safetensors" in disk and "must be writable" in disk
    assert [path.name for path in tmp_path.iterdir()] == ["blocked"]


def test_a_failed_save_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = megazero.initialize(make_mixed(), config(0, "fp32"))
    engine.save_16bit_model(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        engine.save_16bit_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


class FrozenMixed(Mixed):
    """The model with a frozen floating-point parameter beside."""

    def __init__(self) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.full((3,), 1 / 3), requires_grad=False)


def save_masters(rank: int, folder: str, stage: int, precision: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    settings = config(stage, precision) | {"optimizer": {"type": "SGD", "lr": 1e-4}}
    engine = megazero.initialize(FrozenMixed(), settings, mesh=mesh_in_worker(rank, dp=2))
    x = torch.linspace(-1, 1, 20).view(4, 5).to(engine.module.scalar.dtype)
    for _ in range(2):  # too little for bfloat16 to show
        engine.backward(engine(x).float().square().mean())
        engine.step()
    engine.save_fp32_model(folder)
    found = {n: v for n, p in engine.module.named_parameters() if (v := safe_get_full_fp32_param(p)) is not None}
    assert engine.zero_engine.gathered_numel[0] == 0
    engine.close()
    return found


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (2, "fp32"), (3, "bf16"), (3, "fp64")])
def test_the_master_weights_are_written_one_by_one(stage: int, precision: str, tmp_path: Path) -> None:
    masters, _ = run_ranks(2, save_masters, str(tmp_path), stage, precision)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    torch.manual_seed(4)
    start = FrozenMixed().state_dict()
    assert found.keys() == start.keys() - {"head.weight", "alias.weight", "alias.bias"}
    for name, value in found.items():
        assert value.dtype == (dtype if start[name].is_floating_point() else start[name].dtype)
        assert name not in masters or torch.equal(value, masters[name]), name
    assert masters.keys() == {
        "embed.weight",
        "scalar",
        *(f"layers.{n}.{kind}" for n in "01" for kind in ("weight", "bias")),
    }
    working = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[precision]
    assert torch.equal(found["anchor"], start["anchor"].to(working).to(dtype))
    if precision == "bf16":
        weight = found["layers.0.weight"]
        assert not torch.equal(weight, weight.bfloat16().float()), "they have digits that working parameters lack"
