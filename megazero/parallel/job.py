"""The job of a command: who starts its processes, `--processes N` or a launcher, and how many there are.

Every command of several processes reads it here, so that all take part in a job on several nodes in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megazero.command_line.processes import split_processes
from megazero.parallel.launch import Launch, NodeShare, several_nodes_notice


@dataclass(frozen=True)
class Job:
    """The job that a command line is for.

    rest: its words without `--processes`.  launch: this process's own.  processes: those that this program starts on
    its node, None if it is one of the job's processes itself.  share: this node's of several, None for a job on one.
    """

    rest: list[str]
    launch: Launch
    processes: int | None = None
    share: NodeShare | None = None

    @property
    def nodes(self) -> int:
        """The nodes on which programs like this one start processes."""
        return 1 if self.share is None else self.share.nodes

    @property
    def world_size(self) -> int:
        """The processes of the job."""
        return self.launch.world_size if self.processes is None else self.processes * self.nodes

    @property
    def first_rank(self) -> Launch:
        """The launch of rank 0 where this program starts the processes; otherwise this process's own."""
        if self.processes is None:
            return self.launch
        return Launch(0, self.world_size, 0, ranks_per_node=(self.processes,) * self.nodes)

    @property
    def notices(self) -> tuple[str, ...]:
        """Lines for a process that is alone on a node of several, which its user may not have meant."""
        alone = several_nodes_notice() if self.processes is None and self.launch.world_size == 1 else ""
        return (alone,) if alone else ()


def read_job(words: Sequence[str]) -> Job:
    """Read a command line's job, from `--processes` and the launcher's variables.

    Raises ConfigError for a wrong `--processes`, TopologyError for variables that contradict each other or it.
    """
    own = split_processes(words)
    share = None if own.number is None else NodeShare.from_environment(own.number)
    return Job(own.rest, Launch.from_environment(), own.number, share)
