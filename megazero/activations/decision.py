"""Decide when partitioned checkpoints (Pa), and checkpoints in host memory (Pa+cpu), pay (ZeRO, section 8).  Pure.

Both cost traffic and free memory; what the memory buys is a larger batch.  A step's data-parallel traffic does not
grow with the batch, so with a batch n times as large the same samples need 1/n of it.  The terms, in seconds of one
step of one rank:

    t_dp    what the step spends on the data-parallel axis (section 7 gives the volume).
    t_pa    Pa's price: one all-gather of a checkpoint, b s h elements, for every checkpoint and micro-batch, before
            its recomputation.  A block's tensor-parallel traffic is 12 b s h (two all-reduces each in forward,
            recomputation and backward, each twice its message), so Pa adds a twelfth: less than 10 %.
    t_cpu   Pa+cpu's price: what a rank stores (checkpoints, or the slices that Pa leaves of them) goes to the host and
            comes back, twice its bytes.

Pa divides the memory of checkpoints by the tensor-parallel degree Nm, so the batch grows up to Nm times and t_dp falls
to t_dp / Nm for the same samples.  The section's trade, a tenth more tensor-parallel traffic for data-parallel traffic
an order of magnitude smaller, pays when

    t_pa < t_dp - t_dp / Nm

Pa+cpu leaves almost no memory of checkpoints.  It is for the extreme case in which data-parallel traffic is
the bottleneck even with Pa, and pays as long as moving to the host costs less than the communication that remains:

    t_cpu < t_dp / Nm        without Pa: t_cpu < t_dp

A switch that the user has set stays as it is, and the other is decided given that one.  Where the user has set
checkpoints to be in host memory, the batch does not wait for Pa to free the device; then Pa saves host traffic instead,
which is this file's reading, not the paper's:

    t_pa < t_cpu - t_cpu / Nm        t_cpu of whole checkpoints
"""

from dataclasses import dataclass
from typing import Literal

from megazero.comm.metered import sent_bytes
from megazero.units import format_bytes

Switch = bool | Literal["auto"]


@dataclass(frozen=True)
class CheckpointSizes:
    """The checkpoints of one forward: `number` tensors of [b, s, h], itemsize bytes an element."""

    number: int
    micro_batch_size: int
    seq_length: int
    hidden_size: int
    itemsize: int

    @property
    def bytes_of_one(self) -> int:
        return self.micro_batch_size * self.seq_length * self.hidden_size * self.itemsize

    @property
    def nbytes(self) -> int:
        return self.number * self.bytes_of_one


@dataclass(frozen=True)
class Volumes:
    """The bytes that one rank stores and sends in one step.

    checkpoints: the whole checkpoints of all micro-batches.
    data_parallel: the bytes that the rank sends on the data-parallel axis, as the meter counts them.
    tensor_parallel_size: Nm, the ranks over which Pa cuts a checkpoint.
    """

    checkpoints: int
    data_parallel: int
    tensor_parallel_size: int

    @property
    def gathered(self) -> int:
        """The bytes that a rank sends for Pa's all-gathers."""
        return sent_bytes("all_gather", self.checkpoints, self.tensor_parallel_size)

    def moved(self, *, partitioned: bool) -> int:
        """Return the bytes that go to the host and come back, each way counted."""
        return 2 * self.checkpoints // (self.tensor_parallel_size if partitioned else 1)


def volumes(
    checkpoints: CheckpointSizes, *, num_micro_batches: int, tensor_parallel_size: int, data_parallel_bytes: int
) -> Volumes:
    """Return the volumes of a step; data_parallel_bytes: the bytes that the step sends on the data-parallel axis."""
    return Volumes(num_micro_batches * checkpoints.nbytes, data_parallel_bytes, tensor_parallel_size)


@dataclass(frozen=True)
class Speeds:
    """The bytes a second that a rank sends on an axis (infinite where it is alone) and copies to the host or back."""

    tensor_parallel: float
    data_parallel: float
    host: float


@dataclass(frozen=True)
class Decision:
    """The chosen switches.

    partition: Pa; in_cpu: Pa+cpu, or whole checkpoints in host memory; reasons: lines to print.
    """

    partition: bool
    in_cpu: bool
    reasons: tuple[str, ...]


def decide(volumes: Volumes, speeds: Speeds, *, partition: Switch = "auto", in_cpu: Switch = "auto") -> Decision:
    """Choose a value for each switch that is "auto"."""
    reasons = []
    if partition == "auto":
        partition, reason = _partition(volumes, speeds, in_cpu=in_cpu is True)
        reasons.append(reason)
    if in_cpu == "auto":
        in_cpu, reason = _in_cpu(volumes, speeds, partitioned=partition)
        reasons.append(reason)
    return Decision(partition, in_cpu, tuple(reasons))


def _partition(volumes: Volumes, speeds: Speeds, *, in_cpu: bool) -> tuple[bool, str]:
    ranks = volumes.tensor_parallel_size
    if ranks == 1:
        return False, "partition_activations auto: off, tensor parallel 1 leaves nothing to partition"
    cost = volumes.gathered / speeds.tensor_parallel
    if in_cpu:
        saves_from, traffic = volumes.moved(partitioned=False) / speeds.host, "of host copies"
    else:
        saves_from, traffic = volumes.data_parallel / speeds.data_parallel, "on the data-parallel axis"
    gain = saves_from * (1 - 1 / ranks)
    pays = cost < gain
    price = _price(volumes.gathered, speeds.tensor_parallel, cost)
    return pays, (
        f"partition_activations auto: {_on(pays)}, gathering {price} a step,"
        f" and saves up to {_milliseconds(gain)} of {_milliseconds(saves_from)} {traffic}"
    )


def _in_cpu(volumes: Volumes, speeds: Speeds, *, partitioned: bool) -> tuple[bool, str]:
    moved = volumes.moved(partitioned=partitioned)
    cost = moved / speeds.host
    left = volumes.data_parallel / speeds.data_parallel / (volumes.tensor_parallel_size if partitioned else 1)
    pays = cost < left
    after = " that Pa may leave" if partitioned else ""
    price = _price(moved, speeds.host, cost)
    return pays, (
        f"checkpoint_in_cpu auto: {_on(pays)}, copying {price} a step,"
        f" against {_milliseconds(left)} on the data-parallel axis{after}"
    )


def _price(nbytes: int, bandwidth: float, seconds: float) -> str:
    return f"{format_bytes(nbytes)} at {format_bytes(bandwidth)}/s takes {_milliseconds(seconds)}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _on(pays: bool) -> str:
    return "on" if pays else "off"
