"""What the launcher tells a process of its job: which rank it is, of how many, and who shares its node.

Known before torch is loaded, so that what is wrong with a command line is told at once.
"""

import os
from dataclasses import dataclass, replace

from megazero.errors import Problem, TopologyError
from megazero.parallel.nodes import Nodes, parse_tasks_per_node


@dataclass(frozen=True)
class Launch:
    """What the launcher (torchrun or srun) told this process.

    ranks_per_node: processes of every node, ranks being counted node by node; () where the launcher doesn't say.
    """

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: tuple[int, ...] = ()

    @property
    def nodes(self) -> Nodes:
        """Which rank is on which node; one node has them all where nothing is known."""
        return Nodes(self.ranks_per_node or (self.world_size,))

    @property
    def node(self) -> int:
        """The node that this process is on, counted from 0."""
        return self.nodes.of(self.rank)

    @staticmethod
    def from_environment() -> "Launch":
        """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; in a job step of Slurm without a RANK, Slurm's names.

        A process that is started by hand, or by a batch script without srun, is alone.  Raises TopologyError.
        """
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
        by_slurm = not os.environ.get("RANK") and os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"
        if by_slurm:
            names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"]
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
        return Launch(rank, world, local)._on_nodes(names[3], given, by_slurm=by_slurm)

    def _on_nodes(self, name: str, given: str, *, by_slurm: bool) -> "Launch":
        """The same with the processes of every node, as far as the variable `name` tells them of all nodes."""
        told = os.environ.get(name, "")
        try:
            sizes = parse_tasks_per_node(told)
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
            raise TopologyError(Problem(f"{given}, {name} {told}", rule, "srun --distribution=block"))
        return self
