"""Bounds of a layout's memory and time by formulas, below what a dry run of it finds, in some ten microseconds.

Memory of a pipeline stage: model states by the table of placements (`zero/plan.py`), for the elements of the blocks'
matrices and of the vocabulary alone, and the activations that backward cannot do without.  Time of a step: products,
and messages of tensor parallelism that nothing runs beside, in every micro-batch; the stages' order; and the messages
of the data-parallel axis at their links' highest rate, of which a channel carries one after the other.  Everything else
is left out, so that a layout whose bound is too high is one that a dry run would refuse as well.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from megazero.comm.groups import split_keys
from megazero.comm.mesh import CONTROL
from megazero.config import derived
from megazero.config.optimizers import OPTIMIZERS, RUN_NAMES, in_numbers
from megazero.parallel.nodes import Nodes
from megazero.parallel.topology import ENDS, REPLICAS, SHARDS, Topology
from megazero.planner.advice.choices import AdvisedRun, LayoutChoice, configured
from megazero.planner.costs import Group, attention_rate, collective_seconds, group_of
from megazero.planner.curves import Curve, constant
from megazero.planner.hardware import Hardware, Link
from megazero.train.pipeline_stages import pipeline_split
from megazero.train.start.check import topology
from megazero.zero.layout import prefetch_limit
from megazero.zero.plan import Home, Lifetime, OptimizerShape, Placement, model_state_bytes, resolve

# Moments of optimizers that certainly have them, which are all that a bound may count.
_MOMENTS = MappingProxyType({"AdamW": 2, "Adam": 2, "Lion": 1})
_OF_ATTENTION = 4  # operations of its two products by elements of queries and tokens of a sequence


class Bound(NamedTuple):
    """The least bytes of the fullest stage's device, by what has them, and the least seconds of a step."""

    memory: Mapping[str, int]
    seconds: float

    @property
    def total(self) -> int:
        return sum(self.memory.values())


class _Pass(NamedTuple):
    """The least seconds of a micro-batch on a stage."""

    forward: float = 0.0
    backward: float = 0.0


class _Passes(NamedTuple):
    """The least seconds of a micro-batch in a layer and in the head, and the elements that a layer saves of it."""

    forward: float
    backward: float
    head: float
    saved: int

    def of_stage(self, layers: int, *, has_head: bool) -> _Pass:
        return _Pass(layers * self.forward + has_head * self.head, layers * self.backward)


def at_best(hardware: Hardware) -> Hardware:
    """Return the machine whose links have no latency and carry every message at their highest rate."""
    links = {
        kind: Link(
            0.0,
            constant(link.rates.highest),
            {name: {n: constant(curve.highest) for n, curve in row.items()} for name, row in link.collectives.items()},
        )
        for kind, link in hardware.links.items()
    }
    return replace(hardware, links=links)


def highest_up_to(curve: Curve, size: float) -> float:
    """Return the highest rate of a curve at any size up to this one, into which work may be cut."""
    return max([curve.at(size), *(rate for point, rate in curve.points if point <= size)])


class _Layout(NamedTuple):
    """A cut of the model: the chunks of a stage, and (layers, elements on a rank) of every stage."""

    chunks: int
    stages: tuple[tuple[int, int], ...]


class _Sent(NamedTuple):
    """The least seconds and bytes that the data-parallel axis takes of a stage.

    behind: seconds from its last reduction on.  reduced, gathered: seconds of messages of a micro-batch.  once: those
    of a step.  leased: gradients are reduced in every micro-batch.  memory: bytes of model states.
    """

    behind: float
    reduced: float
    gathered: float
    once: float
    leased: bool
    memory: Mapping[str, int]


@dataclass(frozen=True)
class Bounds:
    """The bounds of a run's layouts on a machine of these nodes; `_found`: parts that layouts have in common."""

    run: AdvisedRun
    vocab_size: int
    hardware: Hardware
    nodes: Nodes
    _found: dict[tuple[object, ...], Any] = field(default_factory=dict, repr=False)

    def of(self, choice: LayoutChoice) -> Bound:
        """Return the bounds of a layout."""
        copies = self.nodes.world_size // (choice.tensor_model_parallel_size * choice.pipeline_model_parallel_size)
        count = self.run.samples // copies // choice.micro_batch_size
        layout = self._once(("cut", choice[:5]), lambda: self._cut(choice))
        one = self._once(("layer", choice[:2], choice[4], choice[-2:]), lambda: self._passes(choice))
        itemsize = resolve(self.run.config.zero, self.run.config.precision).parameter.itemsize
        stated = self._once(("stated", choice[:2], choice[5:10]), lambda: self._stated(choice))
        memory: Mapping[str, int] = {}
        most, seconds = -1, 0.0
        before = _Pass()
        last = len(layout.stages) - 1
        for stage, (layers, numel) in enumerate(layout.stages):
            sent = self._once(
                ("sent", choice[:-2], layers, numel),
                lambda: self._data_parallel(choice, layers, numel),  # noqa: B023
            )
            own = one.of_stage(layers, has_head=stage == last)
            saved = min(count, last + 1 - stage) * layers * one.saved * itemsize
            held = sum(sent.memory.values()) + saved
            if held > most:
                most, memory = held, {**sent.memory, "activations": saved, "stated": stated}
            start = before.forward / layout.chunks
            work = start + count * (own.forward + own.backward)
            first = start + own.forward + (0 if sent.leased else (count - 1) * (own.forward + own.backward))
            messages = max(sent.reduced * (count if sent.leased else 1), sent.once)
            waits = before.backward * (0.5 if choice.pipeline_schedule == "zero-bubble" else 1.0) / layout.chunks
            seconds = max(seconds, work + waits, work + sent.behind, first + messages + sent.behind)
            seconds = max(seconds, start + count * sent.gathered)
            before = _Pass(before.forward + own.forward, before.backward + own.backward)
        return Bound(memory, seconds)

    def _once(self, key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        """Return what `make` does, made once for each key."""
        if key not in self._found:
            self._found[key] = make()
        return self._found[key]

    def _cut(self, choice: LayoutChoice) -> _Layout:
        config = configured(self.run.config, choice, self.run.samples)
        model, slices, stages = config.model, choice.tensor_model_parallel_size, choice.pipeline_model_parallel_size
        rows = derived.vocab_rows(config, self.vocab_size)
        split = pipeline_split(config, rows)
        block, table = derived.block_matrices(model) // slices, rows * model.hidden_size // slices
        tables = [int(stage == 0) for stage in range(stages)]
        tables[-1] += stages > 1 or model.untie_embeddings_and_output_weights
        layers = [sum(split[stage::stages]) for stage in range(stages)]
        found = tuple((own, own * block + has * table) for own, has in zip(layers, tables, strict=True))
        return _Layout(derived.num_virtual_chunks(config), found)

    def _group(self, choice: LayoutChoice, axis: str) -> Group:
        """Return the group of a rank in the middle along an axis."""
        found = self._topology(choice)
        rank = found.rank_of(pp=found.pp // 2)
        make = lambda: group_of(tuple(self.nodes.of_all(found.group_of(rank, axis))))  # noqa: E731
        group: Group = self._once(("group", choice[:2], choice[5:10], axis), make)
        return group

    def _topology(self, choice: LayoutChoice) -> Topology:
        config = configured(self.run.config, choice, self.run.samples)
        make = lambda: topology(config, self.nodes.world_size, self.nodes)  # noqa: E731
        found: Topology = self._once(("ranks", choice[:2], choice[5:10]), make)
        return found

    def _stated(self, choice: LayoutChoice) -> int:
        """Return the bytes that no tensor accounts for, of a stage between the ends."""
        hardware, keys = self.hardware, split_keys(self._topology(choice)).keys() - {ENDS, CONTROL}
        return hardware.context_bytes + hardware.workspace_bytes + len(keys) * hardware.communicator_bytes

    def _saved(self, choice: LayoutChoice) -> int:
        """Return the least elements that a layer saves of a micro-batch."""
        model, slices = self.run.config.model, choice.tensor_model_parallel_size
        tokens = choice.micro_batch_size * model.seq_length
        whole = tokens * model.hidden_size // (slices if choice.sequence_parallel else 1)
        if choice.recompute_granularity == "full":
            return whole
        inner = derived.ffn_hidden_size(model)
        heads = model.num_attention_heads * derived.head_width(model)
        pairs = 2 * derived.num_key_value_heads(model) * derived.head_width(model)
        mixed = heads if choice.recompute_granularity == "none" else 0
        # Inputs and results of both norms; queries, keys, values, what attention makes of them, and the inner width.
        return 4 * whole + tokens * (heads + pairs + mixed + 2 * inner) // slices

    def _passes(self, choice: LayoutChoice) -> _Passes:
        """Return the least seconds of a layer and of the head."""
        products, attention, message, head = self._of_layer(choice)
        trained = not self.run.config.model.lora_rank
        split = choice.sequence_parallel
        messages = 4 if split else 2
        forward = products + attention + messages * message
        # Gathers ahead of each of the two last products of backward run beside nothing.
        backward = (2 * products + 2 * attention + 2 * message * split) * trained
        if choice.recompute_granularity == "full":
            backward += products + attention + (messages - 1) * message
        return _Passes(forward, backward, head * (3 if trained else 1), self._saved(choice))

    def _of_layer(self, choice: LayoutChoice) -> tuple[float, float, float, float]:
        """Return the least seconds of a micro-batch: a layer's products, attention, one message, the head's product."""
        config, hardware, slices = self.run.config, self.hardware, choice.tensor_model_parallel_size
        model, precision = config.model, config.precision.precision
        formats = [hardware.format_of(precision)]
        formats += [hardware.format_of("fp8")] if config.precision.fp8_format is not None else []
        speed = max(hardware.speed(1), 1.0)
        tokens, hidden = choice.micro_batch_size * model.seq_length, model.hidden_size
        heads, inner = model.num_attention_heads * derived.head_width(model), derived.ffn_hidden_size(model)
        pairs = 2 * derived.num_key_value_heads(model) * derived.head_width(model)

        def product(width: int, rows: int) -> float:
            """Return the seconds of [tokens, width] by [width, rows] / slices, which may be cut further."""
            flops = 2 * tokens * width * rows / slices
            curves = [curve for name in formats for curve in hardware.matrix[name].curves]
            return flops / max(highest_up_to(curve, (flops / 2) ** (1 / 3)) for curve in curves) / speed

        products = sum(product(hidden, width) for width in (heads + pairs, (1 + model.swiglu) * inner, heads, inner))
        fused = hardware.is_asynchronous and config.training.attention_backend != "unfused"
        masked = model.position_embedding_type == "alibi" or config.data.reset_attention_mask
        rate = max(curve.highest for name in formats for curve in hardware.matrix[name].curves)
        if "attention" in hardware.kernels:
            rate = max(rate, hardware.kernels["attention"].highest)
        if fused and not masked:
            rate = attention_rate(hardware, precision, length=model.seq_length, width=derived.head_width(model))
        attention = _OF_ATTENTION * tokens * model.seq_length * heads / slices / rate / speed
        message = 0.0
        if slices > 1:
            kind = "all_gather" if choice.sequence_parallel else "all_reduce"
            nbytes = tokens * hidden * resolve(config.zero, config.precision).parameter.itemsize
            message = collective_seconds(hardware, kind, nbytes, self._group(choice, "tp"))
        return products, attention, message, product(hidden, derived.vocab_rows(config, self.vocab_size))

    def _data_parallel(self, choice: LayoutChoice, layers: int, numel: int) -> _Sent:
        """Return the least that model states take of a stage of so many layers and elements."""
        config, best = configured(self.run.config, choice, self.run.samples), at_best(self.hardware)
        zero, plan = config.zero, resolve(config.zero, config.precision)
        shards, replicas = self._group(choice, SHARDS), self._group(choice, REPLICAS)
        kind = RUN_NAMES[config.optimizer.optimizer]
        shape = OptimizerShape(_MOMENTS.get(in_numbers(kind), 0), in_8_bits=bool(OPTIMIZERS[kind].package))
        if config.model.lora_rank:  # frozen parameters have no other states
            parts = shards.size if plan.parameter.placement is Placement.PARTITIONED else 1
            held = numel * plan.parameter.itemsize // parts if plan.parameter.home is Home.DEVICE else 0
            return _Sent(0.0, 0.0, 0.0, 0.0, leased=True, memory={"parameters": held})
        states = model_state_bytes(plan, numel, shards.size, Home.DEVICE, shape)
        owned = numel // (1 if plan.optimizer.placement is Placement.REPLICATED else shards.size)
        # Master weights and moments are read and written, and the gradient is read.
        moved = owned * (2 * plan.optimizer.itemsize + plan.gradient.itemsize)
        moved += 2 * shape.moment_bytes(owned, plan.optimizer.itemsize)
        curves = {**best.operators, **best.kernels}
        rates = [curve.highest for kind, curve in curves.items() if kind != "attention"]
        at_home = plan.optimizer.home is Home.DEVICE or not best.is_asynchronous
        behind = moved / (max(rates) if at_home else best.kernel_rate("host").highest) / max(best.speed(1), 1.0)
        leased = plan.gradient.lifetime is Lifetime.LEASED
        nbytes = numel * plan.gradient_wire.itemsize
        if zero.zero_quantized_gradients:
            share = numel * zero.zero_quantized_gradients_bits / 8 / shards.per_node
            across = best.links["across"].rates.highest
            reduced = share * (shards.nodes - 1) / shards.nodes / across if shards.nodes > 1 else 0.0
        else:
            kind = "all_reduce" if plan.gradient.placement is Placement.REPLICATED else "reduce_scatter"
            reduced = collective_seconds(best, kind, nbytes, shards)
        once = collective_seconds(best, "all_reduce", nbytes / shards.size, replicas)
        gathered = 0.0
        if plan.parameter.placement is Placement.PARTITIONED:
            # Layers that are needed soon stay gathered where forward turns to backward, and backward to forward, as
            # many as have room in the elements of the largest unit, a layer or a table, and of the prefetch window.
            layer = derived.block_matrices(config.model) // choice.tensor_model_parallel_size
            rows = derived.vocab_rows(config, self.vocab_size)
            largest = max(layer, rows * config.model.hidden_size // choice.tensor_model_parallel_size)
            ahead = prefetch_limit(shards.size, largest, zero.prefetch_bucket_size)
            of_layers = max(layers - (largest + ahead) // layer, 0) * layer
            width = zero.zero_quantized_weights_bits / 8 if choice.zero_quantized_weights else plan.parameter.itemsize
            whole = collective_seconds(best, "all_gather", of_layers * width, shards)
            once, gathered = (max(once, whole), 0.0) if zero.zero_hpz_partition_size > 1 else (once, 2 * whole)
        elif plan.gradient.placement is Placement.PARTITIONED:
            behind += collective_seconds(best, "all_gather", numel * plan.parameter.itemsize, shards)
        return _Sent(behind, reduced, gathered, once, leased, vars(states))
