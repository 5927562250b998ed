"""Tests zero.Init: its models equal models made whole, ranks hold only slices of them, and they can be trained."""

import gc
import importlib.util
import io
import math
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.any_models import CASES
from support.each import each
from support.irregular_model import LR, SETTINGS, Awkward, EngineRun, batch, full_state, loss_of, train_plain, units_of
from support.late_copies import late_copies
from support.processes import mesh_in_worker, run_ranks
from support.training import boxes
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.config.engine_sections import PrecisionConfig, ZeroConfig
from megazero.errors import ConfigError, UsageError
from megazero.library.partitioned_init import parameters as kept
from megazero.library.partitioned_init import slices as slices_module
from megazero.library.partitioned_init.init import Init, first_value
from megazero.memory.fused_buffers import FusedBuffers
from megazero.optim.inner import FusedAdamW, StepInputs
from megazero.parallel.param_spec import spec_of
from megazero.zero.engine import Engine, EngineSettings
from megazero.zero.parameters.gathered import GatheredParameters
from megazero.zero.parameters.guard import PartitionedParameter, handle_of
from megazero.zero.plan import resolve


def values(model: nn.Module) -> dict[str, Tensor]:
    with GatheredParameters(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    assert found.keys() == expected.keys()
    unequal = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert unequal == []
    return True


def live_bytes(model: nn.Module) -> int:
    return sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())


REMOTE = (None, "cpu", "nvme")


def kept_at(remote: str | None, folder: Path) -> dict[str, Any]:
    """Return the arguments of an Init that keeps slices in a kind of memory or in files, and converts nothing."""
    zero = {"zero_stage": 3, "offload_param": "nvme", "nvme_path": str(folder)} if remote == "nvme" else {}
    config = {"config_dict_or_path": {"zero": zero}} if zero else {}
    return {"remote_device": remote, "tensor_overrides": ["device"], **config}


@contextmanager
def small_files() -> Iterator[None]:
    """Let files of slices that are made inside be small, so that there are many, and their blocks pages."""
    with patch.multiple(slices_module, _BLOCK_BYTES=4096, _SEGMENT_BYTES=8192):
        yield


def open_files(folder: Path) -> int:
    """Return the number of this process's open files that were made in a folder."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(link.is_symlink() and str(folder) in os.readlink(link) for link in links)


# --- equality with models made without Init ----------------------------------------------------------------------


class NanoGpt(nn.Module):
    """A model that draws its values three times: in its layers, by apply inside its constructor, and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(17, 6), nn.Embedding(5, 6)
        self.h = nn.ModuleList([NanoBlock() for _ in range(3)])
        self.ln_f = nn.LayerNorm(6)
        self.lm_head = nn.Linear(6, 17, bias=False)
        self.wte.weight = self.lm_head.weight
        self.gain = nn.Parameter(torch.randn(1))
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(6))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(6, 18), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(6, 1))


class Redrawing(nn.Module):
    """A model whose constructor changes the parameters of finished modules in all the ways that constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.conv, self.lstm = nn.Conv1d(4, 4, 3), nn.LSTM(3, 4, num_layers=2)
        self.embed = nn.Embedding(7, 3, padding_idx=2)
        self.list = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)])
        nn.init.orthogonal_(self.a.weight)
        nn.init.eye_(self.b.weight)
        nn.init.dirac_(self.conv.weight)
        nn.init.trunc_normal_(self.conv.bias)
        nn.init.kaiming_uniform_(self.list[0].weight, a=math.sqrt(5))
        nn.init.sparse_(self.list[1].weight, sparsity=0.4)
        self.embed.reset_parameters()  # writes through a view
        self.a.bias.data.normal_().mul_(2)
        self.list[2].weight.data = torch.randn(3, 3)
        for row in self.lstm.weight_hh_l0.data:
            row.fill_(float(row.sum()))
        with torch.no_grad():
            self.b.weight[1:3, ::2] += self.a.weight[:2, ::2].t().contiguous().view(-1)[:6].view(2, 3)
            self.b.weight.copy_(self.b.weight @ self.a.weight)
            self.lstm.bias_ih_l1.uniform_()
        self.spread = self.lstm.weight_ih_l0.std().item()
        self.register_buffer("start", self.a.weight.detach().clone())
        self.list[0].weight.requires_grad_(False)
        self.half = nn.Linear(4, 2).half()


class Growing(nn.Module):
    """A model with buffers and with parameters replaced, dropped, assigned late, empty, of one element, or integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.first.weight = nn.Parameter(self.second.weight.t())
        self.second.weight = nn.Parameter(torch.randn(3, 3), requires_grad=False)
        self.first.bias = None
        table = torch.randn(9, 2)
        self.top, self.bottom = nn.Parameter(table[:4]), nn.Parameter(table[4:])
        self.one, self.none = nn.Parameter(torch.randn(())), nn.Parameter(torch.empty(0, 3))
        self.ids = nn.Parameter(torch.randint(9, (5,)), requires_grad=False)
        self.register_buffer("ones", torch.ones(2))
        self.list = nn.ParameterList([torch.randn(2) for _ in range(3)])
        self.late = self.list[1]
        self.lazy = nn.LazyLinear(3)
        self.dropped = nn.Linear(2, 2)
        del self.dropped


MODELS: dict[str, Callable[[], nn.Module]] = {
    "nano": NanoGpt,
    "redrawing": Redrawing,
    "growing": Growing,
    "awkward": Awkward,
    "function": lambda: nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)]),
    "lone": lambda: nn.Linear(3, 2),
    **{name: case.make for name, case in CASES.items()},
}
SEED = 3


def made_whole(name: str) -> nn.Module:
    torch.manual_seed(SEED)
    return MODELS[name]()


def made_under_init(rank: int, dp: int, remote: str | None, folder: Path) -> list[bool]:
    with late_copies(), small_files():
        return equal_models(rank, dp, remote, folder)


def equal_models(rank: int, dp: int, remote: str | None, folder: Path) -> list[bool]:
    outcomes = []
    for name in MODELS:
        mesh = mesh_in_worker(rank, dp=dp)
        torch.manual_seed(SEED + 10 * rank)
        with Init(mesh=mesh, **kept_at(remote, folder)) as init:
            model = MODELS[name]()
        drawn = torch.rand(1)
        whole = made_whole(name)
        assert rank or torch.equal(drawn, torch.rand(1)), f"{name}: rank 0 has drawn as many numbers"
        assert getattr(model, "spread", 0) == getattr(whole, "spread", 0)
        for made in (model, whole):
            if hasattr(made, "lazy"):
                del made.lazy  # has no values to compare
        partitioned = [parameter for parameter in model.parameters() if parameter.numel()]
        assert all(isinstance(parameter, PartitionedParameter) for parameter in partitioned), name
        assert live_bytes(model) == 0
        assert [id(p) for p in model.parameters()] == [id(p) for p in dict(model.named_parameters()).values()]
        traits = [
            [(n, p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters(remove_duplicate=False)]
            for m in (model, whole)
        ]
        assert traits[0] == traits[1], name
        assert rank or same(dict(model.named_buffers()), dict(whole.named_buffers())), "buffers are each rank's own"
        outcomes.append(same(values(model), dict(whole.named_parameters())))
        taken = {
            name: first_value(spec_of(name, parameter), parameter).flatten()
            for name, parameter in model.named_parameters()
        }
        assert same(taken, {name: parameter.flatten() for name, parameter in whole.named_parameters()})
        is_left = remote == "nvme" and bool(init._sliced)  # what a constructor has dropped, and python not collected
        assert not (is_left and name in ("function", "lone"))
        assert bool(open_files(folder)) == is_left and list(folder.iterdir()) == []
        del init
        gc.collect()
        assert open_files(folder) == 0
    return outcomes


@pytest.mark.gloo
@pytest.mark.parametrize(("dp", "remote"), [(3, None), (1, "cpu"), (3, "nvme")])
def test_made_as_if_whole(dp: int, remote: str | None, tmp_path: Path) -> None:
    for rank in run_ranks(dp, made_under_init, dp, remote, tmp_path):
        assert rank == [True] * len(MODELS)


def huggingface_model(rank: int, kind: str) -> bool:
    import transformers

    sizes: dict[str, dict[str, int]] = {
        "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 12, "vocab_size": 31, "n_positions": 8},
        "bert": {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 12, "intermediate_size": 20},
    }
    made = []
    for under in (True, False):
        torch.manual_seed(SEED + (10 * rank if under else 0))
        config = transformers.AutoConfig.for_model(kind, **sizes[kind])
        with Init(mesh=mesh_in_worker(rank, dp=2), enabled=under):
            made.append(transformers.AutoModelForCausalLM.from_config(config))
    assert live_bytes(made[0]) == 0 and live_bytes(made[1]) > 0
    assert made[0].get_output_embeddings().weight is made[0].get_input_embeddings().weight
    return same(values(made[0]), dict(made[1].named_parameters()))


@pytest.mark.gloo
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_models_of_huggingface(kind: str) -> None:
    assert run_ranks(2, huggingface_model, kind) == [True, True]


# --- memory ------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """A mode that counts the most bytes that storages made inside it hold together, checked after every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.storages.add(tensor.untyped_storage())
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages))
        return result


WIDTH = 64
SQUARE = 4 * WIDTH * WIDTH  # bytes


class Wide(nn.Module):
    """A model of 16 squares of float32, at most 3 in one module; all made in lists, and drawn again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([WideBlock() for _ in range(4)])
        self.list = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])
        with torch.no_grad():
            for parameter in self.parameters():
                nn.init.normal_(parameter)
        self.apply(lambda module: None)


class WideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))
        self.lower = nn.Linear(WIDTH, WIDTH, bias=False)


def memory_of_making(rank: int, dp: int, remote: str | None, folder: Path) -> tuple[int, int]:
    """Return the most live bytes while a model is made, and while its values are read one by one."""
    mesh = mesh_in_worker(rank, dp=dp, is_late=False)
    with patch.object(kept, "_GATHERED_NUMEL", 512), small_files():
        with LiveBytes() as making, Init(mesh=mesh, **kept_at(remote, folder)):
            model = Wide()
        with LiveBytes() as giving:
            for name, parameter in model.named_parameters():
                first_value(spec_of(name, parameter), parameter)
    assert live_bytes(model) == 0
    return making.peak, giving.peak


@pytest.mark.gloo
@each("remote", [None, "cpu"])
def test_a_rank_holds_slices_and_one_module(remote: str | None, tmp_path: Path) -> None:
    slices = 16 * SQUARE // 2
    for making, giving in run_ranks(2, memory_of_making, 2, remote, tmp_path):
        assert making <= slices + 3 * SQUARE  # a block's own 2 squares, and 1 of the block inside it
        # 2 whole squares, their slice, a buffer; and memory of earlier ones that the backend has not released yet.
        assert giving < 4 * SQUARE
    ((alone, _),) = run_ranks(1, memory_of_making, 1, remote, tmp_path)
    assert alone >= 16 * SQUARE, "the count sees what is there"


@pytest.mark.gloo
@each("dp", [1, 2])
def test_a_rank_holds_buffers_and_one_module_beside_files(dp: int, tmp_path: Path) -> None:
    buffers = 3 * 2 * 4096  # a page each, aligned within two
    for making, giving in run_ranks(dp, memory_of_making, dp, "nvme", tmp_path):
        assert making <= 4 * SQUARE + buffers  # as above, and a square that is gathered, drawn and copied
        assert giving < 4 * SQUARE + buffers


# --- blocks within blocks, and blocks that fail ------------------------------------------------------------------


@each("remote", REMOTE)
def test_blocks_within_and_after_blocks(remote: str | None, tmp_path: Path) -> None:
    """What inner and earlier blocks have stored stays there when another block takes the parameters over."""
    arguments = kept_at(remote, tmp_path)
    with late_copies(), small_files():
        torch.manual_seed(SEED)
        with Init(**arguments):
            earlier = nn.Linear(40, 40)
        with Init(**arguments) as outer:
            before = nn.Linear(30, 50)
            with Init(**{**arguments, "tensor_overrides": ["dtype"]}, dtype=torch.float64):
                inner = nn.Linear(50, 60)
                nn.init.constant_(before.weight, 2.0)
            nn.init.constant_(inner.bias, 3.0)
            model = nn.Sequential(before, inner, earlier, nn.Linear(60, 20))
        torch.manual_seed(SEED)
        layers = nn.Linear(40, 40), nn.Linear(30, 50), nn.Linear(50, 60).double(), nn.Linear(60, 20)
        nn.init.constant_(layers[1].weight, 2.0)
        nn.init.constant_(layers[2].bias, 3.0)
        expected = dict(nn.Sequential(layers[1], layers[2], layers[0], layers[3]).named_parameters())
        assert all(handle_of(parameter).owner is outer for parameter in model.parameters())
        assert same(values(model), expected)
        assert (open_files(tmp_path) > 3) == (remote == "nvme")
        for name, parameter in model.named_parameters():
            assert torch.equal(first_value(spec_of(name, parameter), parameter), expected[name].flatten())
        assert open_files(tmp_path) == 0


@each("remote", REMOTE)
def test_a_block_that_fails_frees_what_is_whole_again(remote: str | None, tmp_path: Path) -> None:
    made: list[nn.Module] = []

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)
            self.layer = nn.Linear(40, 40)
            self.own = nn.Parameter(torch.ones(2000))
            with GatheredParameters(self.own, modifier_rank=0), torch.no_grad():
                self.own.fill_(2.0)
            raise RuntimeError("no")

    init = Init(**kept_at(remote, tmp_path))
    with late_copies(), small_files():
        torch.manual_seed(SEED)
        with pytest.raises(RuntimeError, match="no"), init:
            Failing()
        own, weight = made[0].own, made[0].layer.weight
        assert type(own) is nn.Parameter and handle_of(own) is None and bool((own == 2).all())
        torch.manual_seed(SEED)
        assert same(values(made[0].layer), dict(nn.Linear(40, 40).named_parameters()))
        for parameter in (weight, made[0].layer.bias):
            assert (open_files(tmp_path) > 0) == (remote == "nvme")
            first_value(spec_of("layer", parameter), parameter)
        assert open_files(tmp_path) == 0 and init.num_partitions == 1


# --- training ----------------------------------------------------------------------------------------------------


def train(rank: int, stage: int, dp: int, remote: str | None, folder: Path) -> EngineRun:
    """Train as support.irregular_model does, but a model made under Init."""
    mesh = mesh_in_worker(rank, dp=dp)
    torch.manual_seed(7 + 10 * rank)
    with Init(mesh=mesh, dtype=torch.float64, **{**kept_at(remote, folder), "tensor_overrides": ["dtype", "device"]}):
        model = Awkward()
    model.register_parameter("ordinary", nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False))
    home = {"offload_param": "nvme", "nvme_path": folder} if remote == "nvme" else {}
    zero = ZeroConfig(zero_stage=stage, reduce_bucket_size=100, **home)
    plan, buffers = resolve(zero, PrecisionConfig(precision="fp64")), FusedBuffers(0, mesh.device)
    settings = EngineSettings(zero, FusedAdamW(SETTINGS), first_value)
    engine = Engine(model, units_of(model, split=True), plan, mesh=mesh, buffers=buffers, settings=settings)
    buffers.resize(engine.largest_buffer_bytes)
    assert all(handle_of(parameter).owner is engine for parameter in model.parameters())
    for step in range(STEPS):
        engine.begin_step()
        x, y = batch(step)
        engine.backward(loss_of(model, x.chunk(dp)[rank], y.chunk(dp)[rank]), is_last=True)
        engine.finish_reductions()
        engine.update(StepInputs(LR, torch.ones((), dtype=torch.float64), None))
    working = values(model)
    owned = [box for fragment in engine.owned_state() for box in boxes(fragment)]
    engine.close()
    return EngineRun([], owned, {}, 0, working)


STEPS = 3


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "remote"), [(0, None), (1, None), (2, None), (3, None), (3, "cpu"), (3, "nvme")])
def test_an_engine_takes_over(stage: int, remote: str | None, tmp_path: Path) -> None:
    _, parameters = train_plain(STEPS)
    runs = run_ranks(3, train, stage, 3, remote, tmp_path)
    weights = full_state(runs)
    assert torch.equal(weights.pop("ordinary"), torch.ones(3, dtype=torch.float64))
    assert weights.keys() == parameters.keys()
    for name, value in parameters.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-12)
        for run in runs:
            torch.testing.assert_close(run.working[name], value, rtol=1e-10, atol=1e-12)


# --- arguments, and what user code may ask of the context ---------------------------------------------------------


def write_without_a_modifier(rank: int, checks: bool, remote: str | None, folder: Path) -> tuple[str, bool, bool]:
    """Write on rank 1 in a block that only reads; return the error, and whether only the next block's write is kept."""
    home = {"offload_param": "nvme", "nvme_path": str(folder)} if remote == "nvme" else {}
    config = {"zero": {"zero_stage": 3, "enable_sanity_checks": checks, **home}}
    with Init(mesh=mesh_in_worker(rank, dp=2), remote_device=remote, config_dict_or_path=config) as init:
        model = nn.Linear(3, 3)
        with GatheredParameters(model.weight):
            nn.init.ones_(model.weight)  # it is under construction, so that rank 0's values are kept
    text = ""
    try:
        with GatheredParameters(model), torch.no_grad():
            if rank == 1:
                model.weight.data.add_(1.0)
    except UsageError as error:
        text = str(error)
    unchanged = bool((values(model)["weight"] == 1).all())
    with GatheredParameters(model, modifier_rank=1), torch.no_grad():
        model.weight.fill_(rank)
    assert (init.get_partition_rank(), init.num_partitions) == (rank, 2)
    return text, unchanged, bool((values(model)["weight"] == 1).all())


@pytest.mark.gloo
@pytest.mark.parametrize("checks", [True, False])
@each("remote", REMOTE)
def test_changes_without_a_modifier_are_an_error_on_every_rank_where_checked(
    checks: bool, remote: str | None, tmp_path: Path
) -> None:
    for text, unchanged, stored in run_ranks(2, write_without_a_modifier, checks, remote, tmp_path):
        assert ("weight changed in GatheredParameters on some rank" in text) == checks
        assert unchanged and stored


def test_a_state_dict_lists_names_and_shapes_without_values() -> None:
    """A program finds what a checkpoint lacks; whoever reads a value of what is partitioned gets an error."""
    with Init():
        model = nn.BatchNorm1d(2)
        assert torch.equal(model.state_dict()["weight"], torch.ones(2))
    state = model.state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        name: tuple(value.shape) for name, value in nn.BatchNorm1d(2).state_dict().items()
    }
    assert torch.equal(state["running_var"], torch.ones(2))
    for use in (lambda: state["weight"].sum(), lambda: torch.save(state, io.BytesIO()), lambda: state["bias"].clone()):
        with pytest.raises(UsageError, match=r"after zero\.Init"):
            use()
    with GatheredParameters(model):
        assert torch.equal(model.state_dict()["weight"], torch.ones(2))


def test_overrides_of_tensors() -> None:
    """Number formats are converted where "dtype" is among the overrides, named by a word or by an enum's member."""
    member = Enum("DeepSpeedTensorOverride", ["dtype", "device"])
    for overrides, expected in [(("dtype",), torch.bfloat16), ([member.device], torch.float32), ([], torch.float32)]:
        with Init(tensor_overrides=overrides, config_dict_or_path={"precision": {"precision": "bf16"}}) as init:
            model = nn.BatchNorm1d(2)
        assert model.weight.dtype == model.running_mean.dtype == expected
        assert init.get_dp_process_group() is None and init.num_partitions == 1


@each(
    ("arguments", "named"),
    [
        ({"remote_device": "disk"}, "remote_device"),
        ({"remote_device": "nvme"}, "(?s)without a configuration.*nvme_path"),
        ({"remote_device": "nvme", "config": {}}, "with a configuration without nvme_path"),
        ({"remote_device": "nvme", "config_dict_or_path": {"zero": {"zero_stage": 3}}}, "nvme_path"),
        ({"pin_memory": True}, "pin_memory"),
        ({"zero_param_parallel_group": object()}, "zero_param_parallel_group"),
        ({"param_swapper": object()}, "param_swapper"),
        ({"tensor_overrides": ["layout"]}, "layout"),
        ({"tensor_overrides": [], "dtype": torch.bfloat16}, "tensor_overrides"),
        ({"data_parallel_group": object(), "mpu": object()}, "data_parallel_group"),
        ({"config": {}, "config_dict_or_path": {}}, "config_dict_or_path"),
        ({"dtype": torch.int32}, "dtype"),
    ],
)
def test_arguments_without_an_effect_are_refused_by_name(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Init(**arguments)
    Init(**arguments, enabled=False)
