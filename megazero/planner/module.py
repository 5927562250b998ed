"""Plans a user's own module: `megazero.plan` runs one rank of `megazero.initialize` dry, through two steps.

The ranks of a data-parallel job do the same, so the first one stands for all of them.  Tensors are hollow
(`dry/hollow.py`): neither the module nor what it computes has memory here, whatever their sizes.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from megazero.comm.wires.shard_group import PLAIN, Wires
from megazero.config.engine_sections import ReportConfig
from megazero.errors import ConfigError, Problem, UsageError, raise_problems
from megazero.library.config import EngineConfig, load_engine_config, resolve_batch
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.library.initialize import assemble, read_settings
from megazero.library.optimizers import MakeOptimizer
from megazero.library.partitioned_init.init import Init
from megazero.parallel.data_axis import data_axis
from megazero.parallel.nodes import Nodes
from megazero.parallel.topology import Topology
from megazero.planner.dry.rank import DryRank, RankRecord
from megazero.planner.forecast import Forecast
from megazero.planner.hardware import Hardware
from megazero.planner.hops import decided_hops
from megazero.planner.job_plan import JobPlan
from megazero.planner.machines import hardware_of
from megazero.planner.seconds import step_time
from megazero.planner.show import lines
from megazero.planner.trace import Compute
from megazero.rules.states import shard_groups_are_equal
from megazero.verify.module import LossOf, MakeModel, checked_loss
from megazero.zero.parameters.guard import handle_of
from megazero.zero.plan import Placement, resolve, wires


@dataclass(frozen=True)
class ModuleJob:
    """A job of `megazero.initialize` that is run dry, all of whose ranks are data parallel.

    model_fn, batch, loss_fn, optimizer, made_in_parts: as `plan` is given them.  settings: checked, without reports.
    rows: the samples of a micro-batch.
    """

    model_fn: MakeModel
    settings: EngineConfig
    batch: Any
    rows: int
    loss_fn: LossOf
    optimizer: MakeOptimizer | None
    made_in_parts: bool
    nodes: Nodes
    is_gpu: bool

    @property
    def world_size(self) -> int:
        return self.nodes.world_size

    @property
    def topology(self) -> Topology:
        return data_axis(self.settings.zero, Topology(dp=self.world_size), self.nodes)

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of one rank in one step."""
        return resolve_batch(self.settings, self.world_size).accumulation

    @property
    def tokens(self) -> int:
        """The samples of a step, of all ranks: a module of a user's own may have no tokens."""
        return self.rows * self.num_micro_batches * self.world_size

    @property
    def wires(self) -> Wires:
        return wires(self.settings.zero)

    @property
    def attention_backend(self) -> str:
        return "auto"

    @property
    def compiles(self) -> bool:
        """False: a program compiles its module itself, or does not."""
        return False

    def micro_batch(self) -> Any:
        """Return the samples of a micro-batch."""
        return self.batch() if callable(self.batch) else self.batch


@dataclass(frozen=True, eq=False)
class ModulePlan:
    """The memory and time that a training of a module takes of a machine; as text it is a page for a reader.

    plan: memory by category, its peak with module and line, and traffic, part by part.  forecast: the time of a step.
    """

    plan: JobPlan
    forecast: Forecast

    @property
    def fits(self) -> bool:
        """True if every device, and every node's host memory, has room for its ranks."""
        return self.plan.fits

    @property
    def peak_bytes(self) -> int:
        """The most bytes of tensors that are alive at once on a device, in any part."""
        return max(part.memory.peak_bytes for rank in self.plan.ranks for part in rank.parts.values())

    def to_json(self) -> dict[str, Any]:
        """Return everything that is in the plan, in bytes and seconds, as `megazero plan --format json` prints it."""
        return {**self.plan.to_json(), "time": self.forecast.to_json()}

    def __str__(self) -> str:
        return "\n".join((*self.forecast.lines(), "", *lines(self.plan)))


def plan(
    model_fn: MakeModel,
    config: EngineConfig | Mapping[str, Any] | str | Path,
    batch: Any,
    *,
    world_size: int,
    loss_fn: LossOf | None = None,
    optimizer: MakeOptimizer | None = None,
    hardware: str | Hardware = "dgx-h100",
    made_in_parts: bool | None = None,
) -> ModulePlan:
    """Return what training a module by `megazero.initialize(model, config)` on `world_size` processes takes.

    Nothing is trained and no process is started; the module's and the engine's own code runs on tensors without memory
    or values, through start-up and two steps.

    model_fn: makes the module.  It is planned as if it made it on the device.
    config: that of `megazero.initialize`.
    batch: a micro-batch of one rank, or a function that makes one.  Only the shapes of its tensors count.
    loss_fn(model, batch): returns a micro-batch's loss, of the engine.  None: the model is called with the batch, its
    items as arguments if it is a tuple, a list or a mapping; of what it returns, `loss` or the first tensor is the
    loss, and the mean of that one if it has several elements.
    optimizer: a function that makes one of the parameters; None: the configuration's.
    hardware: the name of a machine, or a file that describes one (docs/planning.md).
    made_in_parts: the module is made under `megazero.zero.Init`; None: in stage 3.

    Raises ConfigError or UsageError for arguments that no training could have, with all problems of their kind, and
    UsageError for a module whose shapes depend on values.
    """
    machine = hardware_of(hardware) if isinstance(hardware, str) else hardware
    raise_problems(UsageError, _problems(model_fn, batch, optimizer))
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        given = f"world_size={world_size!r}"
        raise ConfigError(Problem(given, "a job has a whole number of processes, at least 1", "world_size=64"))
    job = module_job(
        model_fn,
        config,
        batch,
        machine.nodes(world_size),
        loss_fn=loss_fn,
        optimizer=optimizer,
        is_gpu=machine.device == "cuda",
        made_in_parts=made_in_parts,
    )
    zero, _ = decided_hops(job.settings.zero, job.topology, job.nodes, machine)
    job = replace(job, settings=replace(job.settings, zero=zero))
    began = time.perf_counter()
    ranks = (run_module_rank(job, 0),)
    planned = JobPlan(job, machine, ranks, time.perf_counter() - began)
    return ModulePlan(planned, _forecast(planned, job))


def module_job(
    model_fn: MakeModel,
    config: EngineConfig | Mapping[str, Any] | str | Path,
    batch: Any,
    nodes: Nodes,
    *,
    loss_fn: LossOf | None = None,
    optimizer: MakeOptimizer | None = None,
    is_gpu: bool = False,
    made_in_parts: bool | None = None,
) -> ModuleJob:
    """Return the job of a module on these nodes; arguments: those of `plan`.  Raises ConfigError."""
    settings = replace(load_engine_config(config), reports=ReportConfig())

    def spell(name: str) -> str:
        return f"zero.{name}"

    problems = [*shard_groups_are_equal(settings.zero, nodes.world_size, spell)]
    is_partitioned = resolve(settings.zero, settings.precision).parameter.placement is Placement.PARTITIONED
    if made_in_parts and not is_partitioned:
        rule = "parameters are partitioned while a module is made if they stay so"
        problems.append(Problem("made_in_parts=True beside whole parameters", rule, "stage 3, or made_in_parts=False"))
    raise_problems(ConfigError, problems)
    in_parts = is_partitioned if made_in_parts is None else made_in_parts
    rows = resolve_batch(settings, nodes.world_size).micro or _rows(batch() if callable(batch) else batch)
    return ModuleJob(model_fn, settings, batch, rows, loss_fn or loss_of, optimizer, in_parts, nodes, is_gpu)


def run_module_rank(job: ModuleJob, rank: int) -> RankRecord:
    """Run a rank of a module's training dry: its start-up, a first and a steady step."""
    with ExitStack() as stack, _values_are_missed():
        dry = DryRank(job, rank, stack)
        made: list[DataParallelEngine] = []
        dry.take("start-up", lambda: made.append(_build(dry, job)))
        engine = made.pop()
        stack.enter_context(dry.recorder.modules_of(engine.module))
        dry.take("first step", lambda: take_step(engine, job))
        dry.take("steady step", lambda: take_step(engine, job))
        record = dry.record(engine.mesh, engine.zero_engine)
        engine.close()
    return record


def take_step(engine: DataParallelEngine, job: ModuleJob) -> None:
    """Take a training step, as a program's loop does."""
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(checked_loss(job.loss_fn(engine, job.micro_batch())))
        engine.step()


def loss_of(model: Any, batch: Any) -> Tensor:
    """Return the loss of a model that is called with a batch; see `plan`."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    found = next((leaf for leaf in tree_leaves(output if loss is None else loss) if isinstance(leaf, Tensor)), None)
    if found is None:
        given = f"a model that returns {type(output).__name__} without a tensor"
        raise UsageError(Problem(given, "backward begins with a loss", "loss_fn=lambda model, batch: ..."))
    return found if found.numel() == 1 else found.float().mean()


def _build(dry: DryRank, job: ModuleJob) -> DataParallelEngine:
    """Make the module and its engine, as a program that calls `megazero.initialize` does."""
    around: AbstractContextManager[Any] = nullcontext()
    if job.made_in_parts:  # before there is an engine, parts are sent in one hop
        around = Init(mesh=dry.mesh(wires=PLAIN)[0], config_dict_or_path=job.settings)
    with around:
        model = job.model_fn()
    mesh, buffers = dry.mesh()
    settings = read_settings(model, job.settings, job.optimizer)
    if _has_other_parts(model, around):
        given = "a module whose function calls megazero.zero.Init"
        raise UsageError(Problem(given, "a plan itself makes the module in parts", "the function without Init"))
    return assemble(model, settings, mesh, buffers, job.optimizer, dry.ledger)


def _forecast(planned: JobPlan, job: ModuleJob) -> Forecast:
    trace = planned.trace
    events = trace.ranks[0].parts["steady step"]
    products = [
        event for event in events if isinstance(event, Compute) and event.where.phase in ("forward", "backward")
    ]
    return Forecast(
        step=step_time(trace, planned.hardware, lambda stage: ()),
        hardware=planned.hardware,
        devices=job.world_size,
        tokens=job.tokens,
        flops=sum(event.operation.flops for event in products) * job.world_size // job.tokens,
        precision=job.settings.autocast or job.settings.precision.precision,
        unit="samples",
    )


def _problems(model_fn: Any, batch: Any, optimizer: Any) -> Iterator[Problem]:
    """Yield the problems of arguments of `plan` that are not what they should be."""
    if isinstance(model_fn, nn.Module) or not callable(model_fn):
        given = f"model_fn of type {type(model_fn).__name__}"
        yield Problem(given, "a plan makes the module itself, without its memory", "lambda: MyModel(...)")
    if batch is None:
        yield Problem("batch=None", "a step is run on a batch's shapes", "batch=torch.zeros(4, 128, dtype=torch.long)")
    if optimizer is not None and (isinstance(optimizer, Optimizer) or not callable(optimizer)):
        given = f"optimizer of type {type(optimizer).__name__}"
        legal = "lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)"
        yield Problem(given, "the parameters are made in the plan, and the optimizer from them", legal)


def _has_other_parts(model: nn.Module, own: Any) -> bool:
    """Return True if a parameter of the model is partitioned by another Init than the plan's, or merged from one."""
    handles = [handle for parameter in model.parameters() if (handle := handle_of(parameter)) is not None]
    return any(handle.owner is not own for handle in handles)


@contextmanager
def _values_are_missed() -> Iterator[None]:
    """Raise UsageError where a shape depends on values, which a dry run has not got."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        given = f"a module that calls {error.func}"
        rule = "the shapes of a planned module do not depend on values"
        raise UsageError(Problem(given, rule, "a model_fn or loss_fn whose tensors have the expected sizes")) from error


def _rows(batch: Any) -> int:
    """Return the rows of a batch: the size of its first tensor's first dim."""
    tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
    return next((len(tensor) for tensor in tensors), 1)
