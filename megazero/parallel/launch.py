"""The launch of a process, from the launcher's variables: its rank, the number of ranks, and the ranks of its node.

It is read before torch is loaded, so that an error in a command line is reported at once.
"""

import os
from dataclasses import dataclass, field, replace

from megazero.errors import Problem, TopologyError
from megazero.parallel.nodes import Nodes, parse_tasks_per_node
from megazero.signals import launcher_process


def job_name() -> str:
    """Return the launcher's name of this job; empty without a launcher that has names."""
    if number := os.environ.get("SLURM_JOB_ID"):
        return f"Slurm job {number}" + (f" of {name}" if (name := os.environ.get("SLURM_CLUSTER_NAME")) else "")
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return "" if name == "none" else f"torchrun's run {name}"


@dataclass(frozen=True)
class NodeShare:
    """The place of this node in a job whose launcher starts one process on each node, and leaves the ranks to it.

    nodes: of the job, at least 2.  node: this one, counted from 0.  host, port: where the nodes meet, on node 0.
    source: the names of the variables, for messages.
    """

    nodes: int
    node: int
    host: str
    port: int
    source: str

    @staticmethod
    def from_environment(processes: int) -> "NodeShare | None":
        """Read Kubeflow's variables, which are torchrun's PET_*, or SkyPilot's; None for a job on one node.

        processes: those of each node.  Raises TopologyError for values that contradict each other.
        """
        environment = os.environ
        if "TORCHELASTIC_RUN_ID" in environment:  # this is a rank already
            return None
        if environment.get("PET_NNODES"):
            names = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_PORT")
            host, per_node = environment.get("PET_MASTER_ADDR", ""), environment.get("PET_NPROC_PER_NODE", "")
            if per_node.isdecimal() and int(per_node) != processes:
                rule = "the manifest and the command line give the same number of processes on each node"
                given = f"PET_NPROC_PER_NODE {per_node} with --processes {processes}"
                raise TopologyError(Problem(given, rule, f"--processes {per_node}"))
        elif environment.get("SKYPILOT_NUM_NODES"):
            names = ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "MASTER_PORT")
            host = environment.get("SKYPILOT_NODE_IPS", "").partition("\n")[0].strip()
        else:
            return None
        defaults = zip(names, ("1", "0", "29500"), strict=True)
        read = {name: environment.get(name) or default for name, default in defaults}
        if not all(text.isascii() and text.isdecimal() for text in read.values()):
            raise TopologyError(Problem(str(read), f"{', '.join(names)} must be whole numbers"))
        nodes, node, port = map(int, read.values())
        if nodes == 1:
            return None
        if not node < nodes or not host or not 0 < port < 1 << 16:
            rule = "nodes count from 0 to their number - 1, and meet at a host and a port of node 0"
            raise TopologyError(Problem(f"{read}, host {host!r}", rule, "leave these variables to the launcher"))
        return NodeShare(nodes, node, host, port, ", ".join(names))


def several_nodes_notice() -> str:
    """Return a line if a launcher has started this program on each of several nodes, for one that starts no ranks.

    Such a program is alone, which its user may not have meant.  Empty for a rank of a job.
    """
    for name in ("PET_NNODES", "SKYPILOT_NUM_NODES"):
        nodes = os.environ.get(name, "")
        if nodes.isdecimal() and int(nodes) > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
            return f"{name} {nodes}: this process is alone; --processes N, or torchrun, on each node makes one job"
    return ""


@dataclass(frozen=True)
class Launch:
    """The figures that the launcher (torchrun, srun or mpirun) gave this process.

    ranks_per_node: processes of every node, ranks being counted node by node; () where the launcher gives none.
    launcher: the process id of the torchrun that started this process; None if another program did.
    """

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: tuple[int, ...] = ()
    launcher: int | None = field(default=None, compare=False)

    @property
    def nodes(self) -> Nodes:
        """The nodes of the job; one node has all ranks if the launcher gives none."""
        return Nodes(self.ranks_per_node or (self.world_size,))

    @property
    def node(self) -> int:
        """The node that this process is on, counted from 0."""
        return self.nodes.of(self.rank)

    @staticmethod
    def from_environment() -> "Launch":
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, or without a RANK mpirun's or Slurm's names.

        A process that is started by hand, or by a batch script without srun, is alone.  Raises TopologyError.
        """
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
        by_slurm = False
        if not os.environ.get("RANK"):
            if "OMPI_COMM_WORLD_RANK" in os.environ:  # by Open MPI; its mpirun may be a step of Slurm's
                names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
            elif os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
                names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"]
                by_slurm = True
            elif "PMI_RANK" in os.environ:  # by MPICH, and what comes from it
                names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
        read = {name: os.environ.get(name) or default for name, default in zip(names, "010", strict=False)}
        try:
            rank, world, local = map(int, read.values())
        except ValueError:
            rule = f"{names[0]}, {names[1]} and {names[2]} must be whole numbers"
            raise TopologyError(Problem(str(read), rule)) from None
        given = ", ".join(f"{name} {value}" for name, value in zip(names, (rank, world, local), strict=False))
        if not 0 <= rank < world or local < 0:
            # A forgotten WORLD_SIZE would make every process a run of its own, all saving to the same folder.
            raise TopologyError(Problem(given, f"ranks count from 0 to {names[1]} - 1", "start with torchrun"))
        return Launch(rank, world, local, launcher=launcher_process())._on_nodes(names[3], given, by_slurm=by_slurm)

    def _on_nodes(self, name: str, given: str, *, by_slurm: bool) -> "Launch":
        """Return the launch with the processes of every node, if the variable `name` holds those of all nodes."""
        given_sizes = os.environ.get(name, "")
        try:
            sizes = parse_tasks_per_node(given_sizes)
        except ValueError:
            return self
        if not by_slurm:
            sizes *= self.world_size // sizes[0]
        if sum(sizes) != self.world_size:
            return self
        known = replace(self, ranks_per_node=sizes)
        if known.nodes.ranks(known.node)[0] + self.local_rank == self.rank:
            return known
        if by_slurm:
            rule = "ranks are counted node by node, so that neighbours share one"
            raise TopologyError(Problem(f"{given}, {name} {given_sizes}", rule, "srun --distribution=block"))
        return self
