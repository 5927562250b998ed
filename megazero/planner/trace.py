"""The trace of a dry rank: what one rank of a job does, in the order in which its host does it.  Pure.

A *dry* rank runs the real code on tensors without values, over process groups that send nothing.  Its trace has one
*event* for everything that would take time on a machine, in five parts that follow one another:

    start-up     from settings to an engine with initial values
    first step   which also makes what later steps find made
    steady step  any later one
    evaluation   one global batch of held-out text, if the run evaluates
    save         a checkpoint, as far as it is copied and sent

Events record what happens, never how long it takes; a time model adds that.  What the order of events means:

    Compute      a kernel.  Those of one home run one after the other: on "device" in the order of the trace, on the
                 current stream; on "host", where offloaded state is updated, the host itself computes before it goes
                 on to the next event; "beside", in the thread of late updates, as soon as the part begins.
    Message      a collective, or one end of a point-to-point message.  It begins when the device's kernels before it
                 have run, and the host goes on at once.  Messages of one *channel* run one after the other, in the
                 order of the trace; those of different channels run beside each other.  A "receive" may stand long
                 before the kernels that need it.
    Copy         bytes between the device and host memory.  It begins as a message does; copies of one direction
                 ("store": to the host, "load": to the device) run one after the other.
    FileAccess   bytes between host memory and a file; the host goes on at once, and each direction has an order.
    TraceWait    the place where the result of an earlier event is needed, named by its number.  waiter "device": the
                 device's kernels behind the wait run after that event, while the host goes on.  "host": the host goes
                 on after it.  An event without a wait ends by itself before the part does.
    Begin        the pipeline action that the events behind it belong to, until the next one.

Numbers are places in the part's tuple of events: `events[wait.number]` is what is waited for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Part = Literal["start-up", "first step", "steady step", "evaluation", "save"]
# "recompute" is a forward pass inside backward; "" is what belongs to no phase of a step.
Phase = Literal["", "forward", "recompute", "backward", "reduce", "update"]
Order = Literal["rows", "columns", "far columns"]
Home = Literal["device", "host", "beside"]
Waiter = Literal["device", "host"]

PARTS: tuple[Part, ...] = ("start-up", "first step", "steady step", "evaluation", "save")


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a kernel reads or writes: its shape, and its number format as torch names it ("bfloat16")."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Operation:
    """A kernel and its sizes.  Equal ones of a trace are one object, so a cost may be computed once for each.

    name: the operator's, without namespace and overload ("mm", "native_layer_norm", "_fused_adamw_").
    inputs: its tensors, in the order of its arguments.  outputs: of its results.
    flops: multiplications and additions of matrix products and of attention, counted apart (an [m, k] by [k, n]
    product has 2 m k n); 0 for every other kernel.  math: the format in which those are multiplied.
    order: how the first factor of a product of two matrices lies in memory: "columns", as in a weight gradient, "far
    columns" where two neighbours of a row are 16 KiB apart or more; "rows" in all other kernels.
    read_bytes, written_bytes: what the kernel must move at the least, each tensor once; a tensor that is changed in
    place counts in both, and of a table only the rows that are looked up count.
    """

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    flops: int
    math: str
    read_bytes: int
    written_bytes: int
    order: Order = "rows"


@dataclass(frozen=True, slots=True)
class Where:
    """The place of an event in the model and in the step.  Equal ones of a trace are one object.

    module: the path of the innermost module whose forward is running ("layers.3.attention.qkv"); in backward, of the
    unit or parameter that it has come to; "" outside the model.
    """

    phase: Phase
    module: str


@dataclass(frozen=True, slots=True)
class Compute:
    """A kernel call; home: which processor computes it, or "beside" for the host's beside the step."""

    operation: Operation
    where: Where
    home: Home = "device"


@dataclass(frozen=True, slots=True)
class Message:
    """A collective that this rank takes part in, or one end of a message to or from another rank.

    channel: the key of its communicator in `RankTrace.channels`.
    collective: "all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "scalars" (an all-reduce of a
    handful of figures), "send", "receive" or "barrier".
    peer: the global rank at the other end of a send or a receive, or the source of a broadcast; None otherwise.
    payload_bytes: of the whole tensor: all ranks' slices of a gather or a scatter together.
    sent_bytes: what this rank must send for it, 0 for a receive.  across_bytes: the part of them for other nodes.
    """

    channel: str
    collective: str
    peer: int | None
    payload_bytes: int
    sent_bytes: int
    across_bytes: int
    where: Where


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy between the device and host memory; way: "store" (to the host) or "load"."""

    way: Literal["store", "load"]
    nbytes: int
    where: Where


@dataclass(frozen=True, slots=True)
class FileAccess:
    """Bytes that are written to a file or read from it."""

    way: Literal["write", "read"]
    nbytes: int
    where: Where


@dataclass(frozen=True, slots=True)
class TraceWait:
    """The place where the result of event `number` of the same part is needed."""

    number: int
    waiter: Waiter


@dataclass(frozen=True, slots=True)
class Begin:
    """The start of a pipeline action: a kind of `pipeline.schedule.Kind` by its letter, micro-batch and local chunk."""

    kind: str
    micro_batch: int
    chunk: int


Event = Compute | Message | Copy | FileAccess | TraceWait | Begin


@dataclass(frozen=True, slots=True)
class Channel:
    """A communicator of this rank.

    axis: the axis of the mesh that its traffic is counted on.  ranks: the global ranks, in its order.
    nodes: the node of each of them.
    """

    axis: str
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The trace of one rank.

    coordinates: its place on the axes "tp", "pp" and "dp".  channels: its communicators, by key.
    parts: its events; a part that the run does not have is missing.
    """

    rank: int
    coordinates: Mapping[str, int]
    channels: Mapping[str, Channel]
    parts: Mapping[Part, tuple[Event, ...]]


@dataclass(frozen=True, slots=True)
class JobTrace:
    """The traces of the ranks of a job that differ: those of the first, a middle and the last pipeline stage.

    world_size: of the job.  ranks: with tensor and data coordinate 0, in the order of their stages.
    tokens: the token positions of a step, of all ranks together.  micro_batches: of one rank's step.
    stages: the number of pipeline stages; stage s of them does what `of_stage(s)` does, but for the order in which its
    schedule takes the actions.
    """

    world_size: int
    stages: int
    micro_batches: int
    tokens: int
    ranks: tuple[RankTrace, ...]

    def of_stage(self, stage: int) -> RankTrace:
        """Return the trace that stands for a pipeline stage: its own, or that of the middle one."""
        own = [trace for trace in self.ranks if trace.coordinates["pp"] == stage]
        return own[0] if own else self.ranks[len(self.ranks) // 2]
