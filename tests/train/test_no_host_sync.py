"""A training step never makes the host wait for a GPU: calls that would make it wait are counted on a CPU.

Two kinds of calls wait: those that read a device's values (`item`, a truth value, shapes that depend on values), and
those that bring the host's values to the device by a plain copy (`torch.tensor`, `.to` without non_blocking).  Reads
are counted as operations, from Python and from C++; calls that run no operation on a CPU are counted in Python.

This holds for every precision: fp16's decision to skip a step is made on the device, and the loop reads it later.

The loop around the step, with all that it records, runs on the meta device as on a GPU: its tensors have no values, so
whatever would read one raises.  Hosts exchange real tensors of their own over gloo beside it.
"""

import contextlib
import io
import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks
from support.small_runs import EOD, DrawnSamples, core_on_rank, tiny_run
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import megazero
from megazero.activations import assemble as activations
from megazero.comm.interface import CompletedWork, ReduceKind, Work
from megazero.comm.local import LocalCommunicator
from megazero.comm.mesh import CONTROL, Mesh
from megazero.comm.metered import Meter, MeteredCommunicator
from megazero.data.loader import BatchLoader
from megazero.library import data_parallel_engine as library
from megazero.library.module import prepare
from megazero.library.step import stepping
from megazero.parallel.launch import Launch
from megazero.parallel.topology import Topology
from megazero.train import build, loop
from megazero.train.build import batch_layout, step_context
from megazero.train.start.check import check
from megazero.train.step import StepControls, training_step
from megazero.zero.parameters import written

OURS = str(Path(megazero.__file__).parent)
STEPS = 3
STATISTICS = (1.0,) * 40  # sums and maxima of weights, moments and gradients, as many as are read
META = torch.device("meta")
EIGHT_BITS = {"hidden_size": 32, "micro_batch_size": 4}  # sizes that such products support

# Operations that read values; indexing by a mask does too, because the size of its result depends on the mask.
READING = frozenset(["_local_scalar_dense", "is_nonzero", "nonzero", "equal", "allclose", "masked_select", "bincount"])
UNIQUE = frozenset(["_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"])
INDEXING = frozenset(["index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"])
# Calls that run no operation where the host is the device.
HOSTWARD = frozenset(["tolist", "numpy", "cpu", "__array__", "item", "__bool__", "__float__", "__int__", "__index__"])
DEVICEWARD = frozenset(["tensor", "as_tensor", "scalar_tensor", "from_numpy"])


class _Operations(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        masked = name in INDEXING and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        by_tensor = name == "repeat_interleave" and func._overloadname != "self_int"
        if name in READING | UNIQUE or masked or by_tensor:
            self._found.append(f"{name} {_where()}")
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, given = getattr(func, "__name__", ""), kwargs or {}
        moves = name == "to" and any(isinstance(a, str | torch.device) for a in (*args[1:], *given.values()))
        if name in HOSTWARD | DEVICEWARD or (moves and not given.get("non_blocking")):
            self._found.append(f"{name} {_where()}")
        return func(*args, **given)


class _Devicewards(TorchFunctionMode):
    """A mode that collects calls which bring the host's values to the meta device and wait until they are there."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, given = getattr(func, "__name__", ""), kwargs or {}
        result = func(*args, **given)
        leaves = [each.device.type for each in args if isinstance(each, Tensor)]
        arrives = isinstance(result, Tensor) and result.is_meta
        copies = name in DEVICEWARD or (name in ("to", "copy_") and "cpu" in leaves)
        if arrives and copies and not given.get("non_blocking"):
            self._found.append(f"{name} {_where()}")
        return result


@contextmanager
def counted() -> Iterator[list[str]]:
    """Yield a list that collects each waiting operation or call of the block: its name and its place in megazero."""
    found: list[str] = []
    with _Calls(found), _Operations(found):
        yield found


def _where() -> str:
    """Return the innermost line of megazero on the stack, or "outside" if there is none, as in torch's own backward."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(OURS)]
    return f"{Path(frames[-1].filename).relative_to(OURS)}:{frames[-1].lineno}" if frames else "outside"


def waits_of_steps(rank: int, settings: dict[str, Any], layout: dict[str, int]) -> list[str]:
    """Return the waits of some steps of two micro-batches, including the first step's allocations and recordings."""
    config = tiny_run(
        timing_log_level=2, **settings, global_batch_size=8, eod_mask_loss=True, clip_grad=0.5, weight_decay=0.1
    )
    core = core_on_rank(rank, config, **layout, is_late=False)  # late works would read values to check them
    parts = step_context(config, core)
    with BatchLoader(DrawnSamples(), batch_layout(config, core.mesh, EOD), prefetch=0) as loader:
        batches = [next(loader) for _ in range(STEPS)]
    with counted() as found:
        reports = [training_step(parts, batch, StepControls(1e-2, 1.0)) for batch in batches]
    assert all(report.loss.isfinite() for report in reports)
    core.engine.close()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_of_one_process_waits_for_nothing(stage: int, precision: str) -> None:
    assert waits_of_steps(0, {"zero_stage": stage, "precision": precision}, {}) == []


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "fp32"), (0, "bf16"), (1, "fp16"), (2, "bf16"), (2, "fp16"), (3, "fp32"), (3, "bf16")]
)
def test_a_step_of_two_processes_waits_for_nothing(stage: int, precision: str) -> None:
    settings = {"zero_stage": stage, "precision": precision, "micro_batch_size": 2}
    assert run_ranks(2, waits_of_steps, settings, {"dp": 2}) == [[], []]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        ({"tensor_model_parallel_size": 2}, {"tp": 2}),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True, "recompute_granularity": "full"}, {"tp": 2}),
        ({"pipeline_model_parallel_size": 2}, {"pp": 2}),
        ({"pipeline_model_parallel_size": 2, "pipeline_schedule": "zero-bubble"}, {"pp": 2}),
        ({"pipeline_model_parallel_size": 2, "reset_position_ids": True, "reset_attention_mask": True}, {"pp": 2}),
        ({"hidden_dropout": 0.1, "attention_dropout": 0.1, "recompute_granularity": "full"}, {"dp": 2}),
        ({"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_cache_weights": True, **EIGHT_BITS}, {"dp": 2}),
    ],
    ids=str,
)
def test_nor_does_one_of_another_layout(settings: dict[str, Any], layout: dict[str, int]) -> None:
    assert run_ranks(2, waits_of_steps, {"precision": "bf16", **settings}, layout) == [[], []]


def test_what_waits_is_seen() -> None:
    """Every way to read a value from the device or bring one to it is counted; the ways that a step uses are not."""
    x, mask, table = torch.arange(4.0), torch.tensor([True, False, True, False]), torch.zeros(3, 2)
    waiting: dict[str, Callable[[], Any]] = {
        "item": lambda: x[1].item(),
        "__float__": lambda: float(x[1]),
        "__bool__": lambda: bool(x[1]),
        "tolist": lambda: x.tolist(),
        "numpy": lambda: x.numpy(),
        "cpu": lambda: x.cpu(),
        "to": lambda: x.to("cpu"),
        "tensor": lambda: torch.tensor([1.0]),
        "nonzero": lambda: x.nonzero(),
        "index": lambda: x[mask],
        "masked_select": lambda: x.masked_select(mask),
        "equal": lambda: torch.equal(x, x),
        "_unique2": lambda: x.unique(),
        "index_put_": lambda: x.__setitem__(mask, torch.ones(2)),
    }
    for name, call in waiting.items():
        with counted() as found:
            call()
        assert name in [each.split()[0] for each in found], name
    with counted() as found:
        y = torch.where(mask, x, 0.0) * 2 + x[torch.arange(2)].sum()
        table.index_add_(0, torch.arange(2), torch.ones(2, 2))
        y.to(torch.float64).to("cpu", non_blocking=True).masked_fill_(mask, 1.0)
    assert found == []


class _Reading(torch.autograd.Function):
    """A function that reads a value of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float(grad.abs().max().item() < 1.0)


def test_backward_is_watched_too() -> None:
    x = torch.ones(3, requires_grad=True)
    with counted() as found:
        _Reading.apply(x).sum().backward()
    assert any(each.startswith("_local_scalar_dense") for each in found)


# --- the loop, on a device without values -----------------------------------------------------------------------------


class _Elsewhere(LocalCommunicator):
    """The communicator of an axis whose other ranks are never met: it carries tensors of the meta device alone."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    def all_gather_into(self, output: Tensor, input: Tensor, label: int | None = None) -> Work:
        return self._carry(output, input)

    def reduce_scatter_into(self, output: Tensor, input: Tensor, key: int | None = None) -> Work:
        return self._carry(output, input)

    def all_to_all_into(self, output: Tensor, input: Tensor) -> Work:
        return self._carry(output, input)

    def all_reduce(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        return self._carry(tensor)

    def all_reduce_scalars(self, tensor: Tensor, kind: ReduceKind = "sum") -> Work:
        return self._carry(tensor)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._carry(tensor)

    def send(self, tensor: Tensor, to: int) -> Work:
        return self._carry(tensor)

    def receive_into(self, tensor: Tensor, source: int) -> Work:
        return self._carry(tensor)

    def barrier(self) -> None:
        raise AssertionError("a barrier waits for the device")

    def _carry(self, *tensors: Tensor) -> Work:
        assert all(tensor.is_meta for tensor in tensors), "NCCL carries no tensor of the CPU"
        return CompletedWork()


class _Launched:
    """The work that a host has launched, in order: read-backs, and what else a test appends.

    steps: the number after which nothing more is launched, so that the host may wait.  values: those of a read-back.
    """

    def __init__(self, *values: float, steps: int | None = None) -> None:
        self.order: list[object] = []
        self.values, self.steps = list(values), steps

    def read_back(self, figures: Sequence[Tensor]) -> "_Readback":
        """Be `HostCopy` on a device without values."""
        assert all(figure.is_meta for figure in figures)
        self.order.append(_Readback(self, len(list(figures))))
        return self.order[-1]


class _Readback:
    """Figures that may be read only when work behind them has been launched, for which the host does not wait."""

    def __init__(self, launched: _Launched, count: int) -> None:
        self._launched, self._count = launched, count

    def read(self) -> list[float]:
        is_over = len(self._launched.order) == self._launched.steps
        assert is_over or self._launched.order[-1] is not self, "the device has nothing else to do meanwhile"
        return self._launched.values[: self._count]


def on_meta(mesh: Mesh) -> Mesh:
    """Return a mesh as a GPU's job has it: its axes carry tensors of the meta device, `control` those of hosts."""
    axes = {
        key: MeteredCommunicator(_Elsewhere(axis.size, axis.rank), key.partition("_")[0], mesh.meter, key)
        for key, axis in mesh.communicators.items()
    }
    return replace(mesh, device=META, communicators={**axes, CONTROL: mesh.world})


def run_on_meta(rank: int, size: int, folder: str, settings: dict[str, Any]) -> list[str]:
    """Train a whole run on the meta device with every record that a run can keep; return the waiting copies to it."""
    layout = {
        axis: settings.get(f"{name}_model_parallel_size", 1) for axis, name in (("tp", "tensor"), ("pp", "pipeline"))
    }
    mesh = mesh_in_worker(rank, dp=size // layout["tp"] // layout["pp"], **layout) if size > 1 else None
    records = {
        "metrics_file": f"{folder}/m.jsonl",
        "tensorboard_dir": f"{folder}/board",
        "log_memory_to_tensorboard": True,
        "log_params_norm": True,
        "log_num_zeros_in_grad": True,
        "log_layer_grad_norms": True,
        "log_optimizer_states_to_tensorboard": True,
        "log_timers_to_tensorboard": True,
        "timing_log_level": 2,
        "timing_log_option": "all",
    }
    config = tiny_run(
        **{"mock_data": True, "train_iters": STEPS, "precision": "bf16", "log_interval": 1, **records, **settings}
    )
    launch, launched = Launch(rank, size, rank), _Launched(1.0, 1.0, 0.0, 0.0, 0.0, *STATISTICS, steps=STEPS)
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(io.StringIO()):
        if mesh is not None:
            patched.setattr(build, "make_mesh", lambda *args, **kwargs: on_meta(mesh))
        chunk_bytes = MappingProxyType(dict.fromkeys(["cpu", "meta"], 1 << 20))
        patched.setattr(activations, "LOGITS_CHUNK_BYTES", chunk_bytes)
        patched.setattr(loop, "HostCopy", launched.read_back)
        run = build.assemble(config, launch, META, check(config, launch))
        with _Devicewards(found):
            loop.train(run)
    assert len(launched.order) == STEPS
    return found


def records_of(folder: Path, size: int) -> None:
    """Check that a run's records are there, of all steps and of all ranks."""
    lines = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(1, STEPS + 1))
    assert all([rank["rank"] for rank in line["ranks"]] == list(range(size)) for line in lines)
    assert all(len(ranks) == size for line in lines for ranks in line["timers"].values())
    assert list((folder / "board").iterdir())


@pytest.mark.parametrize(
    "settings",
    [
        *({"zero_stage": stage} for stage in (0, 3)),
        {"zero_stage": 2, "precision": "fp32"},
        {"recompute_granularity": "full", "hidden_dropout": 0.1, "attention_dropout": 0.1},
    ],
    ids=str,
)
def test_a_run_of_one_process_reads_nothing_back(settings: dict[str, Any], tmp_path: Path) -> None:
    assert run_on_meta(0, 1, str(tmp_path), settings) == []
    records_of(tmp_path, 1)


@pytest.mark.gloo
@pytest.mark.parametrize(
    "settings",
    [{"zero_stage": 3, "micro_batch_size": 1}, {"pipeline_model_parallel_size": 2, "global_batch_size": 4}],
    ids=str,
)
def test_nor_does_one_of_two_whose_hosts_exchange_figures(settings: dict[str, Any], tmp_path: Path) -> None:
    assert run_ranks(2, run_on_meta, 2, str(tmp_path), settings) == [[], []]
    records_of(tmp_path, 2)
    parts = json.loads((tmp_path / "m.jsonl").read_text().splitlines()[-1])["timers"]
    assert ("forward-recv" in parts) == ("backward-send" in parts) == ("pipeline_model_parallel_size" in settings)


EXEMPT = {
    # What waits: the line of megazero that does, and the reason.
    "the loss scale of the next step depends on whether this one overflowed": ({"precision": "fp16"}, "_one_step"),
    "activation checkpoints are copied to host memory and fetched from there": (
        {"recompute_granularity": "full", "checkpoint_in_cpu": True},
        "copies",
    ),
    "the host updates what lives in its memory": ({"zero_stage": 1, "offload_optimizer": "cpu"}, "copy_working_to"),
}


@pytest.mark.parametrize("reason", EXEMPT)
def test_what_waits_is_known_by_name(reason: str, tmp_path: Path) -> None:
    settings, place = EXEMPT[reason]
    with pytest.raises(RuntimeError, match="meta tensor") as caught:
        run_on_meta(0, 1, str(tmp_path), settings)
    frames = [f"{each.path} {each.name}" for each in caught.traceback if str(each.path).startswith(OURS)]
    assert place in frames[-1], frames


def test_the_librarys_step_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that asks after every step whether to stop is answered with the step before."""
    launched = _Launched(0.0, 0.0, 1.0)  # not skipped, no parameter, and the norm
    for module in (library, stepping, written):
        monkeypatch.setattr(module, "HostCopy", launched.read_back)
    monkeypatch.setattr(prepare, "_problems", lambda model: ())  # parameters on the meta device are one
    one = {key: LocalCommunicator() for key in ("pp", "dp", "tp", "ends", "world", "dp_gather")}
    mesh = Mesh(Topology(), 0, META, one, Meter())
    engine = megazero.initialize(
        nn.Linear(4, 4, device=META), {"optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}}, mesh=mesh
    )
    found: list[str] = []
    with _Devicewards(found):
        for _ in range(STEPS):
            engine.backward(engine(torch.ones(2, 4, device=META, dtype=torch.bfloat16)).sum())
            launched.order.append("backward")
            engine.step(stop=False)
            engine.stop_requested()
    assert found == [] and engine.global_steps == STEPS
