"""Measures kernels, the host and messages where they occur: in real training steps of small models, on CPUs.

A kernel that is repeated finds its operands in the caches and its result's memory mapped; a message that is repeated
finds every thread of every rank awake.  In training the caches hold what other kernels have touched, and ranks come to
a message at different moments, from computing.  A CPU runs its kernels while the host waits, so each can be timed in
its place.  All processes train at once, each a model of its own where kernels are timed, so that nothing is sent.

What is left over has no rate of its own: processes that wait for the slowest, caches that a message's copy has filled,
a host that is slower beside large kernels.  So steps of other models, in layouts of all processes, are *held out*: they
give no rates, and by what they take beyond their prediction kernels, messages and the host are made slower
(`held_out`).
"""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from torch.utils._python_dispatch import TorchDispatchMode

from megazero.comm.faults.flight_record import Begun
from megazero.comm.interface import Collective, Communicator, Work
from megazero.comm.links import Links
from megazero.comm.metered import Meter, sent_bytes
from megazero.comm.startup import make_mesh
from megazero.config.run import RunConfig
from megazero.config.validate import validate
from megazero.config.values import RawValue
from megazero.data.loader import build_step_batch
from megazero.data.mock import MockSamples
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.nodes import Nodes
from megazero.planner.calibration.measuring import GroupStopwatch, Place, SmallModel
from megazero.planner.costs import kind_of, product_size
from megazero.planner.curves import Curve, Measurement, pooled
from megazero.planner.dry.operations import Operations
from megazero.planner.dry.rank import DryJob
from megazero.planner.hardware import Hardware
from megazero.planner.job_plan import make_plan
from megazero.planner.predict import forecast_of
from megazero.planner.trace import Operation
from megazero.train.build import batch_layout, build_components, step_context
from megazero.train.start.check import topology
from megazero.train.step import StepControls, training_step

_T = TypeVar("_T")

_WARM_UP = 2  # steps, the first of which makes moments and buffers
_MICRO_BATCHES = 2  # the first writes gradients, the others add to them
_AT_ONCE = 1e-4  # seconds between the start of a message and the wait for it, in which nothing is computed
_LONG_SECONDS = 0.008  # of a message of a step
_LEAST_SHARE = 0.001  # of all kernels' seconds, from which on an operator has rates of its own


class InTraining(NamedTuple):
    """The rates of kernels in training steps, as `Hardware` has them, and the host's seconds for a kernel."""

    products: Curve
    by_order: Mapping[str, Curve]
    kernels: Mapping[str, Curve]
    operators: Mapping[str, Curve]
    host_seconds: float


class _Timed(TorchDispatchMode):
    """A dispatch mode that notes the kernels of operator calls, and the seconds of each, step by step."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self._steps: list[dict[Operation, list[float]]] = []
        self._operations = Operations()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled in these steps, and torch's guard takes longer than what is noted."""
        return False

    def begin(self) -> None:
        """Begin a step."""
        self._steps.append(defaultdict(list))

    def calls(self) -> list[tuple[Operation, int, float]]:
        """Return each kernel, the number of its calls in a step, and their seconds in the middle half of the steps."""
        steps = _middle_half(sorted(self._steps, key=lambda step: sum(map(sum, step.values()))))
        return [
            (operation, len(times), statistics.mean(sum(step[operation]) for step in steps))
            for operation, times in self._steps[-1].items()
        ]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - start
        call = self._operations.of_call(func, args, kwargs or {}, result)
        if call is not None:
            self._steps[-1][call[0]].append(seconds)
        return result


def _middle_half(ordered: Sequence[_T]) -> Sequence[_T]:
    return ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]


class _Taken(NamedTuple):
    """A message that a rank has waited for: the seconds from its start to the wait's end, and those before the wait.

    alone: no other message was in flight when it began.
    """

    begun: Begun
    seconds: float
    before: float
    alone: bool


class ClockedMeter(Meter):
    """A meter that notes what messages take."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[_Taken] = []
        self.in_flight = 0

    def communicator(self, inner: Communicator, axis: str, key: str = "", links: Links | None = None) -> Communicator:
        # An axis of one rank begins no message, and its works would be taken for those of the last one that has begun.
        clocked = inner if inner.size == 1 else cast(Communicator, _Clocked(inner, self))
        return super().communicator(clocked, axis, key, links)


class _Clocked:
    """A communicator whose works note what they take."""

    def __init__(self, inner: Communicator, meter: ClockedMeter) -> None:
        self._inner, self._meter = inner, meter
        self.size, self.rank = inner.size, inner.rank

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*args: Any, **options: Any) -> Any:
            start, alone = time.perf_counter(), self._meter.in_flight == 0
            work = method(*args, **options)
            return work and _ClockedWork(work, self._meter, start, time.perf_counter(), alone)

        return call


class _ClockedWork:
    """A work that is noted when it has been waited for."""

    def __init__(self, work: Work, meter: ClockedMeter, start: float, begun: float, alone: bool) -> None:
        self._work, self._meter, self._start, self._begun, self._alone = work, meter, start, begun, alone
        meter.in_flight += 1
        self._is_waited_for = False
        self._record = meter.flight.begun[-1] if meter.flight.begun else None

    def wait(self) -> None:
        before = time.perf_counter() - self._begun
        self._work.wait()
        if self._is_waited_for:
            return
        self._is_waited_for = True
        self._meter.in_flight -= 1
        if self._record is not None:
            taken = time.perf_counter() - self._start
            self._meter.taken.append(_Taken(self._record, taken, before, self._alone))


class SmallTraining:
    """The training of a small model: on this process alone, or together with all others in a layout.

    settings: of the run, by name, beside the model's.
    """

    def __init__(self, place: Place, model: SmallModel, *, together: bool = False, **settings: Any) -> None:
        world_size, rank = (place.size, place.rank) if together else (1, 0)
        self.config = _run(model, world_size, settings)
        buffers = FusedBuffers(0, place.device)
        self.meter = ClockedMeter()
        mesh = make_mesh(topology(self.config, world_size), rank, place.device, buffers, meter=self.meter)
        core = build_components(self.config, mesh, buffers, vocab_size=model.vocabulary)
        self._engine, self._context = core.engine, step_context(self.config, core)
        samples = MockSamples(model.vocabulary, model.length, seed=0)
        self._batch = build_step_batch(samples, 0, batch_layout(self.config, mesh, eod=None))

    def step(self) -> None:
        """Take one step."""
        training_step(self._context, self._batch, StepControls(lr=1e-4, loss_scale=1.0))

    def close(self) -> None:
        self._engine.close()


def _run(model: SmallModel, world_size: int, settings: Mapping[str, Any]) -> RunConfig:
    tp, pp = (settings.get(f"{axis}_model_parallel_size", 1) for axis in ("tensor", "pipeline"))
    given: dict[str, Any] = {
        **{"num_layers": model.layers, "hidden_size": model.hidden, "num_attention_heads": model.heads},
        **{"seq_length": model.length, "vocab_size": model.vocabulary, "precision": "fp32"},
        **{"micro_batch_size": model.micro_batch},
        **{"global_batch_size": model.micro_batch * _MICRO_BATCHES * (world_size // tp // pp)},
        **{"hidden_dropout": model.dropout, "attention_dropout": model.dropout},
        **{"mock_data": True, "compile": "off", "eval_iters": 0, "train_iters": 10, "lr": 1e-4, "zero_stage": 0},
        **settings,
    }
    outcome = validate({name: RawValue(name, value, name) for name, value in given.items()})
    assert outcome.config is not None, outcome.problems
    return outcome.config


def kernels_in_training(meter: GroupStopwatch) -> InTraining:
    """Time the kernels of steps in which every process trains a model of its own, and what is left of the steps."""
    measured: list[tuple[Operation, int, float]] = []
    hosts: list[float] = []
    for place, model in enumerate(meter.effort.models):
        settings: dict[str, Any] = {"zero_stage": 3 * (place % 2)}
        training = SmallTraining(meter.place, model, **settings)
        for _ in range(_WARM_UP):
            training.step()
        plain, timed = list[float](), _Timed()

        def both(training: SmallTraining = training, plain: list[float] = plain, timed: _Timed = timed) -> None:
            start = time.perf_counter()
            training.step()
            plain.append(time.perf_counter() - start)
            timed.begin()
            with timed:
                training.step()

        meter.times(both)
        training.close()
        calls = timed.calls()
        whole, *seconds = meter.average([statistics.mean(_middle_half(sorted(plain))), *(one for _, _, one in calls)])
        measured += [(operation, count, one) for (operation, count, _), one in zip(calls, seconds, strict=True)]
        hosts.append(max(whole - sum(seconds), 0.0) / sum(count for _, count, _ in calls))
    return rates_of(measured, statistics.median(hosts))


def rates_of(measured: Sequence[tuple[Operation, int, float]], host_seconds: float) -> InTraining:
    """Return the rates that follow from kernels, the numbers of their calls, and the seconds of all of these."""
    kinds: dict[str, list[Measurement]] = defaultdict(list)
    operators: dict[str, list[Measurement]] = defaultdict(list)
    products: dict[str, list[Measurement]] = defaultdict(list)
    for operation, calls, seconds in measured:
        moved = operation.read_bytes + operation.written_bytes
        if "attention" in operation.name:
            kinds["attention"].append((operation.inputs[0].shape[-2], calls * operation.flops, seconds))
        elif operation.flops:
            products[operation.order].append((product_size(operation), calls * operation.flops, seconds))
        elif moved:
            for pool in (kinds[kind_of(operation.name)], operators[operation.name]):
                pool.append((moved, calls * moved, seconds))
    least = _LEAST_SHARE * sum(seconds for _, _, seconds in measured)
    own = {name: pooled(each) for name, each in operators.items() if sum(one for _, _, one in each) >= least}
    orders = {order: pooled(each) for order, each in products.items()}
    return InTraining(
        products=orders.pop("rows"),
        by_order=orders,
        kernels={kind: pooled(each) for kind, each in kinds.items()},
        operators=own,
        host_seconds=host_seconds,
    )


def messages_in_training(meter: GroupStopwatch, tp: int, *, crosses: bool = False) -> Mapping[str, Curve]:
    """Time the messages of tensor-parallel steps, by collective, in bytes that a rank sends a second.

    crosses: ranks of a group are as far apart as they can be, instead of neighbours.
    """
    points: dict[str, list[Measurement]] = defaultdict(list)
    models = [model for model in meter.effort.models if not model.dropout and model.heads % tp == 0]
    longest = 0.0
    for model, splits_sequence in itertools.product(models, (False, True)):
        if longest > _LONG_SECONDS and not splits_sequence:
            break  # over a slow link larger messages take their bytes at its rate, and steps take long
        settings = {
            **{"tensor_model_parallel_size": tp, "sequence_parallel": splits_sequence},
            "rank_order": "tp-pp-dp" if crosses else "pp-dp-tp",
        }
        training = SmallTraining(meter.place, model, together=True, **settings)
        for _ in range(_WARM_UP):
            training.step()
        training.meter.taken.clear()
        meter.times(training.step)
        training.close()
        # Ranks have the same messages, but need not agree on which of them they have waited for at once.
        found: dict[tuple[str, int], list[float]] = defaultdict(list)
        for begun, taken, before, alone in training.meter.taken:
            # One that shares the link with another takes longer, as it does in the order of messages anyway.
            if begun.axis == "tp":
                found[begun.collective, begun.nbytes] += [taken] if before < _AT_ONCE and alone else []
        sums, counts = (meter.average([float(of(each)) for each in found.values()]) for of in (sum, len))
        for (kind, nbytes), seconds, count in zip(found, sums, counts, strict=True):
            if count:
                sent = sent_bytes(cast(Collective, kind), nbytes, tp)
                points[kind].append((nbytes, count * sent, seconds))
                longest = max(longest, seconds / count)
    return {kind: pooled(each) for kind, each in points.items()}


def held_out(meter: GroupStopwatch, hardware: Hardware) -> float:
    """Return what steps without a part in the rates take, as a multiple of what these predict: the median of them.

    A step's figure is what a user finds: the median of its repetitions, on the slowest process.  On several nodes every
    process trains by itself: what a message between nodes takes is a matter of their link alone.
    """
    place, found = meter.place, []
    size = place.size if place.nodes.count == 1 else 1
    for model in meter.effort.held_out:
        for settings in _layouts(model, size):
            training = SmallTraining(place, model, together=size > 1, **settings)
            for _ in range(_WARM_UP):
                training.step()
            seconds = meter.slowest(statistics.median(meter.times(training.step)))
            training.close()
            job = DryJob(training.config, model.vocabulary, Nodes((size,)), is_gpu=False)
            plan = make_plan(job, hardware, parts=("start-up", "first step", "steady step"))
            found.append(seconds / forecast_of(plan).step.seconds)
    return statistics.median(found)


def _layouts(model: SmallModel, size: int) -> Iterator[dict[str, Any]]:
    """Yield the settings of layouts of all processes that a model can be trained in."""
    yield from ({"zero_stage": stage} for stage in (1, 3))
    if size > 1 and model.heads % size == 0:
        yield from ({"tensor_model_parallel_size": size, "sequence_parallel": splits} for splits in (False, True))
    if size > 1 and model.layers % size == 0:
        yield {"pipeline_model_parallel_size": size}
