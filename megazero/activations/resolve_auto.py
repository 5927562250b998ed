"""Choose the activation checkpoint switches that are "auto": measure this machine, then decide."""

from megazero.activations.decision import CheckpointSizes, Decision, Speeds, Switch, decide, volumes
from megazero.comm.bandwidth import axis_bandwidth, minimum_over_ranks
from megazero.comm.mesh import Mesh
from megazero.memory.host import host_bandwidth

# The largest message that is measured; longer ones are hardly faster.
_LARGEST_MESSAGE_BYTES = 1 << 25


def resolve_switches(
    mesh: Mesh,
    checkpoints: CheckpointSizes,
    *,
    num_micro_batches: int,
    data_parallel_bytes: int,
    partition: Switch = "auto",
    in_cpu: Switch = "auto",
) -> Decision:
    """Return the same decision on every rank; all call this with the same arguments, before or between steps.

    data_parallel_bytes: what a rank sends on that axis in a step, as the meter counts; the meter is reset.
    Nothing is measured where no switch is "auto".
    """
    if partition != "auto" and in_cpu != "auto":
        return Decision(partition, in_cpu, ())
    amounts = volumes(
        checkpoints,
        num_micro_batches=num_micro_batches,
        tensor_parallel_size=mesh.topology.tp,
        data_parallel_bytes=data_parallel_bytes,
    )
    speeds = measure(mesh, checkpoint_bytes=checkpoints.bytes_of_one, data_parallel_bytes=data_parallel_bytes)
    return decide(amounts, speeds, partition=partition, in_cpu=in_cpu)


def measure(mesh: Mesh, *, checkpoint_bytes: int, data_parallel_bytes: int) -> Speeds:
    """Measure this job's bandwidths for messages of these sizes; every rank gets those of the slowest."""
    checkpoint = min(checkpoint_bytes, _LARGEST_MESSAGE_BYTES)
    host = minimum_over_ranks(mesh, host_bandwidth(mesh.device, checkpoint))
    tensor_parallel = axis_bandwidth(mesh, "tp", checkpoint)
    data_parallel = axis_bandwidth(mesh, "dp", min(data_parallel_bytes, _LARGEST_MESSAGE_BYTES))
    return Speeds(tensor_parallel, data_parallel, host)
