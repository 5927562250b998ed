"""The words of `megazero plan`: its own flags, and the run of `megazero pretrain`'s flags that it is about."""

import difflib
from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

from megazero.command_line.parse import resolve
from megazero.command_line.sources import with_sources
from megazero.config.run import RunConfig
from megazero.errors import ConfigError, Problem, TopologyError, raise_problems
from megazero.parallel.nodes import Nodes, problems_of_placement
from megazero.planner.hardware import Hardware
from megazero.planner.machines import hardware_of
from megazero.planner.page.controls import DEFAULT
from megazero.rules import run as rules
from megazero.train.start.check import topology
from megazero.train.start.inputs import open_inputs

FORMATS = ("text", "json", "html")
HARDWARE = "dgx-h100"
_VALUED = (
    *("--hardware", "--nodes", "--world-size", "--format", "--compare", "--calibrate", "--output", "--what-if"),
    "--without-nodes",
)
_FEWER = 4  # sets of nodes that are tried where some are gone
_OF_PAGES = ("--output", "--what-if")
_EXAMPLES = MappingProxyType(
    {
        **{"--hardware": HARDWARE, "--format": "json", "--compare": "RUN/metrics.jsonl", "--calibrate": "FILE.yaml"},
        **{"--output": "plan.html", "--what-if": DEFAULT, "--without-nodes": "2"},
    }
)


class Words(NamedTuple):
    """The plan's own flags: values by name; is_paper: --paper, whose value may be left out; is_advice: --advise;
    is_quick: --quick.

    rest: all others, `pretrain`'s.
    """

    values: dict[str, str]
    is_paper: bool
    rest: list[str]
    is_advice: bool = False
    is_quick: bool = False


class Wanted(NamedTuple):
    """A run to plan.  notices: lines about its flags."""

    config: RunConfig
    vocab_size: int
    nodes: Nodes
    notices: tuple[str, ...]


def split_words(words: Sequence[str]) -> Words:
    """Separate the plan's own flags from a command line; raise ConfigError for one without its value."""
    values: dict[str, str] = {}
    rest: list[str] = []
    remaining = list(words)
    is_paper = is_advice = is_quick = False
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name == "--paper":
            is_paper = True
            if equals or (remaining and not remaining[0].startswith("--")):
                values[name] = value if equals else remaining.pop(0)
        elif name == "--advise" and not equals:
            is_advice = True
        elif name == "--quick" and not equals:
            is_quick = True
        elif name not in _VALUED:
            rest.append(word)
        elif equals or (remaining and not remaining[0].startswith("--")):
            values[name] = value if equals else remaining.pop(0)
        else:
            raise ConfigError(Problem(name, "this flag has a value", f"{name} {_example(name)}"))
    if (chosen := values.get("--format", FORMATS[0])) not in FORMATS:
        near = difflib.get_close_matches(chosen, FORMATS, n=1) or FORMATS
        raise ConfigError(Problem(f"--format {chosen}", "a plan is text, JSON or a page", ", ".join(near)))
    for name in _OF_PAGES:
        if name in values and (chosen != "html" or is_paper):
            raise ConfigError(Problem(f"{name} {values[name]}", "this flag is for a page of a run", "--format html"))
    if "--without-nodes" in values and not is_advice:
        given = f"--without-nodes {values['--without-nodes']}"
        raise ConfigError(
            Problem(given, "it is the number of nodes that are gone, for an advisor", f"--advise {given}")
        )
    if is_advice and (
        others := [name for name in ("--compare", "--calibrate") if name in values] + ["--paper"] * is_paper
    ):
        raise ConfigError(Problem(f"--advise {others[0]}", "they answer different questions", f"--advise, {others[0]}"))
    if is_quick and "--calibrate" not in values:
        raise ConfigError(Problem("--quick", "it shortens a calibration", "--calibrate FILE.yaml --quick"))
    if is_advice and "--what-if" in values:
        given = f"--advise --what-if {values['--what-if']}"
        raise ConfigError(Problem(given, "an advisor tries all layouts anyway", "one of the two"))
    return Words(values, is_paper, rest, is_advice, is_quick)


def _example(name: str) -> str:
    return _EXAMPLES.get(name, "16")


def nodes_of(values: dict[str, str], hardware: Hardware) -> Nodes:
    """Return the nodes of a job: --nodes of the machine's devices, or --world-size; by default one node.

    Raises ConfigError for numbers that are none, and for both.
    """
    given = {name: values[name] for name in ("--nodes", "--world-size") if name in values}
    if len(given) == 2:
        shown = " and ".join(f"{name} {value}" for name, value in given.items())
        raise ConfigError(Problem(shown, "one of them sets the size of the job", "--nodes N, --world-size N"))
    for name, value in given.items():
        if not (value.isascii() and value.isdecimal() and 0 < int(value) <= 1 << 20):
            raise ConfigError(Problem(f"{name} {value}", "a job has a whole number of them, at least 1", f"{name} 16"))
    if "--world-size" not in given:
        return Nodes((hardware.devices_per_node,) * int(given.get("--nodes", 1)))
    return hardware.nodes(int(given["--world-size"]))


def nodes_left(values: dict[str, str], nodes: Nodes) -> list[Nodes]:
    """Return the sets of nodes that a run may use: all, or without those that are gone a few fewer too.

    A global batch may not divide by all that are left.  Raises ConfigError if none is left.
    """
    if "--without-nodes" not in values:
        return [nodes]
    text = values["--without-nodes"]
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < nodes.count):
        given = f"--without-nodes {text} of {nodes.describe()}"
        legal = f"--without-nodes 1 to {nodes.count - 1}" if nodes.count > 1 else "--nodes 2 or more"
        raise ConfigError(Problem(given, "some nodes are gone, and some are left", legal))
    left = nodes.count - int(text)
    return [Nodes(nodes.ranks_per_node[:count]) for count in range(left, max(left - _FEWER, 0), -1)]


def read_run(words: Sequence[str], nodes: Nodes) -> Wanted:
    """Return the run that `pretrain`'s flags describe, where "auto" stands for what a plan decides.

    No file is opened but a corpus whose vocabulary is needed.

    A run without a corpus is planned on made-up tokens.  Raises ConfigError or TopologyError with all problems.
    """
    world_size = nodes.world_size
    resolved = resolve([*words, *made_up(words)], world_size=world_size)
    raise_problems(ConfigError, with_sources(resolved.problems, resolved.sources))
    config = resolved.config
    raise_problems(ConfigError, with_sources(rules.check(config, world_size), resolved.sources))
    layout = topology(config, world_size, nodes)
    raise_problems(
        TopologyError, problems_of_placement(layout, nodes, config.parallel.allow_tensor_parallel_across_nodes)
    )
    notices = resolved.notices
    if config.training.enable_cuda_graph:
        beside = "the blocks' gradients and the temporaries of one block's backward"
        notices = (*notices, f"--enable-cuda-graph: the plan leaves out the memory of recorded passes, {beside}")
    return Wanted(config, vocabulary(config), nodes, notices)


def made_up(words: Sequence[str]) -> list[str]:
    """Return the flag of made-up tokens if the words name no corpus, themselves or in a file."""
    resolved = resolve(words, world_size=None)
    data = resolved.config.data
    given = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path, data.mock_data)
    return [] if any(given) else ["--mock-data"]


def vocabulary(config: RunConfig) -> int:
    """Return the vocabulary's size, from the flag or else from the tokenizer or the corpus."""
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    return open_inputs(config.data, config.model, seed=config.training.seed, evaluates=False).vocab_size


def machine(values: dict[str, str]) -> Hardware:
    """Return the machine of --hardware."""
    return hardware_of(values.get("--hardware", HARDWARE))
