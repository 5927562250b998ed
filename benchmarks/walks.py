"""Three walks through the code, as data: the files that a reader opens to follow a loss, a parameter, the ZeRO stage.

A walk is a list of stations in the order in which a run on CPUs comes to them; a station is `module:name`, the module
below megazero/ (or beside it), the name a function, a class or a method.  Where code moves, its station must move
along: a test looks up every one of them.  Behind "was" stands a station in the tree before its files were moved to the
folders of the packages that use them.

    a loss          from the training step to the metrics file and the console
    a parameter     from the model through gradients and update to the checkpoint
    the ZeRO stage  from the flag through configuration and rules to every place that depends on a placement
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

WALKS: Mapping[str, str] = {
    "a loss": """
        train/step:training_step
        train/context:StepContext  was train/parts:StepParts
        pipeline/stage_plan:StagePlan.step  was pipeline/plan:StagePlan.step
        pipeline/schedule:schedule
        pipeline/passes:with_exchanges
        pipeline/runtime:execute
        train/stage_passes:StagePasses.forward
        model/gpt:GPT.loss
        tensor_parallel/vocab:TiedHead.forward
        tensor_parallel/head_loss:summed_cross_entropy
        tensor_parallel/products:TorchProducts.output
        tensor_parallel/cross_entropy:InPlaceSoftmax.losses
        tensor_parallel/regions:exit_region  was tensor_parallel/regions:leave_region
        comm/metered:MeteredCommunicator.all_reduce
        comm/local:LocalCommunicator.all_reduce
        train/stage_passes:StagePasses._losses
        train/step:StepReport
        comm/metered:MeteredCommunicator.all_reduce_scalars
        comm/local:LocalCommunicator.all_reduce_scalars
        train/loop:_Loop._report_steps  was train/loop:_Loop._settle
        report/metrics:StepMetrics  was train/metrics:StepMetrics
        train/loop:_Loop._metrics
        report/writers:MetricsWriter.step  was train/writers:Writer.step
        report/metrics_file:MetricsFile.step  was train/metrics_file:MetricsFile.step
        console:Console.line
    """,
    "a parameter": """
        model/gpt:GPT
        tensor_parallel/layers:sharded_parameter
        parallel/param_spec:ParamSpec
        model/gpt:GPT.units
        train/build:_build_engine
        zero/engine:plan_layout
        optim/inner:OfEngine.group_of  was optim/inner:FusedAdamW.group_of
        zero/layout:build_layout
        zero/shards:Shards
        zero/engine:EngineSettings  was zero/engine:EngineSettings.contents
        model/initial_values:initial_value  was model/initialize:initial_value
        zero/shards:Shards.working
        parallel/gradient_slot:GradientSlot  was parallel/gradient_place:GradientPlace
        zero/gradients/reduce:GradientReducer.gradient_ready  was zero/reduce:GradientReducer.gradient_ready
        zero/gradients/unreduced:LeasedGradients.deposit  was zero/unreduced:LeasedGradients.deposit
        memory/arena_scratch:ArenaScratch.lease
        zero/update:ShardUpdate.apply
        optim/inner:FusedAdamW.update
        zero/parameters/publish:ParameterPublisher.publish  was zero/publish:ParameterPublisher.publish
        train/loop:_Loop._save
        train/saving:Saver.save
        zero/engine:Engine.owned_state
        zero/shards:Shards.owned_state  was zero/state:owned_state
        zero/shards:Shards.owned
        checkpoint/writer:save
        checkpoint/agreement:all_or_none  was checkpoint/agreement:together
        checkpoint/slices:fragment_pieces
        checkpoint/manifest:BoxEntry
        checkpoint/folders:list_steps
    """,
    "the ZeRO stage": """
        commands/pretrain:main  was pretrain_gpt:main
        command_line/parse:parse  was config/cli:parse
        command_line/flags:build_parser  was config/flags:build_parser
        config/fields:FieldInfo
        config/validate:validate
        config/values:coerce  was config/conform:is_number
        config/engine_sections:ZeroConfig  was config/zero:ZeroConfig
        config/run:RunConfig
        train/start/check:check  was train/check:check
        rules/run:check  was config/rules:check
        rules/states:gradients_are_divided_once  was config/state_rules:fp32_gradients_are_wider
        rules/pipeline:pipeline_settings_need_a_pipeline  was config/pipeline_rules:pipeline_settings_need_a_pipeline
        train/program:pretrain
        train/build:build_components  was train/build:build_core
        zero/plan:resolve
        zero/shards:Shards
        zero/gradients/reduce:GradientReducer.finish  was zero/reduce:GradientReducer.finish
        zero/gradients/unreduced:make_store  was zero/unreduced:make_store
        zero/parameters/publish:ParameterPublisher  was zero/publish:ParameterPublisher
        zero/engine:plan_layout
        library/state/access:_State  was zero/access:_State
        library/data_parallel_engine:DataParallelEngine.save_16bit_model
        verify/full_tensors:OwnedTensors  was train/full_tensors:OwnedTensors
    """,
}


class Station(NamedTuple):
    """A place in the code.  module: a path without .py.  name: a qualified name, such as `Class.method`."""

    module: str
    name: str

    def file(self, tree: Path) -> Path:
        inside = tree / "megazero" / f"{self.module}.py"
        return inside if inside.is_file() else tree / f"{self.module}.py"

    def exists(self, tree: Path) -> bool:
        file = self.file(tree)
        return file.is_file() and self.name in _names(ast.parse(file.read_text(encoding="utf-8")))


def stations(text: str, *, before: bool = False) -> list[Station]:
    """Return the stations of a walk; before: those in the tree before its files were moved."""
    return [Station(*line.split()[-1 if before else 0].split(":")) for line in text.strip().splitlines()]


def measure_walks(tree: Path) -> dict[str, dict[str, Any]]:
    """Return for each walk, by its name, a dictionary with "files", "returns", "stations" and "missing".

    files: the number of different files.  returns: the number of stations in a file that was left before.  stations:
    their number.  missing: the stations that the tree does not have.  The stations are today's or those before the
    move, whichever the tree has more of.
    """
    found = [
        {name: measure_walk(tree, stations(text, before=before)) for name, text in WALKS.items()}
        for before in (False, True)
    ]
    return min(found, key=lambda walks: sum(len(walk["missing"]) for walk in walks.values()))


def measure_walk(tree: Path, walk: list[Station]) -> dict[str, Any]:
    """Return the figures of one walk, in the form that `measure_walks` documents."""
    visited: list[str] = []
    returns = 0
    for station in walk:
        if visited and station.module != visited[-1]:
            returns += station.module in visited
        visited.append(station.module)
    return {
        "files": len(set(visited)),
        "returns": returns,
        "stations": len(walk),
        "missing": [f"{station.module}:{station.name}" for station in walk if not station.exists(tree)],
    }


def _names(node: ast.AST, prefix: str = "") -> Iterator[str]:
    """Yield the qualified names of all classes and functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name
            yield from _names(child, f"{prefix}{child.name}.")
