"""The table of placements gives the bytes of the paper's formulas (ZeRO, sections 3.1 and 5)."""

import re
from pathlib import Path

from support.configs import make_run
from support.each import each

import megazero
from megazero.zero.plan import (
    DTYPES,
    Home,
    Lifetime,
    OptimizerShape,
    Placement,
    ZeroPlan,
    model_state_bytes,
    resolve,
)

# (p, g, k): bytes per parameter of the working parameter, the gradient, and master weight plus moments.
SIZES = {
    ("bf16", False): (2, 2, 12),
    ("bf16", True): (2, 4, 12),
    ("fp16", False): (2, 2, 12),
    ("fp16", True): (2, 4, 12),
}
SIZES |= {("fp32", wide): (4, 4, 8) for wide in (False, True)}
SIZES |= {("fp64", wide): (8, 8, 16) for wide in (False, True)}


def plan_of(stage: int, precision: str = "bf16", wide: bool = False) -> ZeroPlan:
    config = make_run(zero_stage=stage, precision=precision, accumulate_allreduce_grads_in_fp32=wide)
    return resolve(config.zero, config.precision)


@each("precision", DTYPES)
@each("wide", [False, True])
@each("ranks", [1, 2, 4, 1024])
def test_bytes_follow_the_formulas(precision: str, wide: bool, ranks: int) -> None:
    p, g, k = SIZES[precision, wide]
    numel = 1024 * 48
    expected = {0: p + g + k, 1: p + g + k / ranks, 2: p + (g + k) / ranks, 3: (p + g + k) / ranks}
    for stage, bytes_per_parameter in expected.items():
        assert model_state_bytes(plan_of(stage, precision, wide), numel, ranks).total == numel * bytes_per_parameter


def test_bytes_with_bf16_masters() -> None:
    """Parameters are their own masters, and both moments are bf16: (p, g, k) is (2, 2, 4)."""
    for stage, bytes_per_parameter in {0: 8, 1: 5, 2: 3.5, 3: 2}.items():
        config = make_run(zero_stage=stage, precision="bf16", bf16_master_weights=True)
        found = model_state_bytes(resolve(config.zero, config.precision), 1024, 4)
        assert (found.total, found.master) == (1024 * bytes_per_parameter, 0)


def test_paper_table_1() -> None:
    """7.5B parameters in fp16 on 64 devices take the GB per device of ZeRO, table 1: baseline, Pos, Pos+g, Pos+g+p."""
    gigabytes = [model_state_bytes(plan_of(stage, "fp16"), 7_500_000_000, 64).total / 1e9 for stage in range(4)]
    assert [round(value, 2) for value in gigabytes] == [120.0, 31.41, 16.64, 1.88]


def test_the_table_itself() -> None:
    rows = {
        stage: (
            *(plan.parameter.placement, plan.parameter.lifetime),
            *(plan.gradient.placement, plan.gradient.lifetime),
            plan.optimizer.placement,
        )
        for stage in range(4)
        for plan in [plan_of(stage)]
    }
    replicated, partitioned = Placement.REPLICATED, Placement.PARTITIONED
    assert rows == {
        0: (replicated, Lifetime.RESIDENT, replicated, Lifetime.RESIDENT, replicated),
        1: (replicated, Lifetime.RESIDENT, partitioned, Lifetime.RESIDENT, partitioned),
        2: (replicated, Lifetime.RESIDENT, partitioned, Lifetime.LEASED, partitioned),
        3: (partitioned, Lifetime.LEASED, partitioned, Lifetime.LEASED, partitioned),
    }


def test_averages_of_rows_and_columns_are_whole_on_every_device() -> None:
    shape = OptimizerShape(num_moments=0, num_averages=50, num_passes=2)
    for stage in range(4):
        found = model_state_bytes(plan_of(stage), 1 << 13, 2, optimizer=shape)
        assert (found.moments, found.master) == (4 * 50, model_state_bytes(plan_of(stage), 1 << 13, 2).master)
    config = make_run(zero_stage=1, precision="bf16", bf16_master_weights=True)
    narrow = resolve(config.zero, config.precision)
    assert model_state_bytes(narrow, 1 << 13, 2, optimizer=shape).moments == 4 * 50, "in fp32 beside bf16 masters too"
    away = resolve(make_run(zero_stage=1, offload_optimizer="cpu").zero, make_run().precision)
    moments = [model_state_bytes(away, 1 << 13, 2, home, shape).moments for home in (Home.DEVICE, Home.HOST)]
    assert moments == [4 * 50, 0]


def test_full_precision_is_its_own_master() -> None:
    assert [plan_of(1, precision).has_separate_master for precision in ("fp64", "fp32", "bf16", "fp16")] == [
        False,
        False,
        True,
        True,
    ]


def test_moments_in_8_bits_take_a_byte_and_a_number_a_block() -> None:
    numel, ranks = 1 << 14, 4
    for stage, part in ((0, numel), (2, numel // ranks)):
        plan = resolve(make_run(zero_stage=stage).zero, make_run().precision)
        shapes = (OptimizerShape(in_8_bits=True), OptimizerShape(1, in_8_bits=True))
        adam, lion = (model_state_bytes(plan, numel, ranks, optimizer=shape) for shape in shapes)
        assert adam.moments == 2 * part + 2 * 4 * part / 256 and lion.moments == adam.moments / 2
        assert adam.master == model_state_bytes(plan, numel, ranks).master


@each("stage", [1, 2, 3])
def test_gradients_in_files(stage: int) -> None:
    """They go to files in the share of master weights."""
    shared = {"zero_stage": stage, "precision": "bf16", "offload_optimizer": "nvme", "nvme_path": Path("files")}
    shared |= {"offload_optimizer_ratio": 0.75, "offload_optimizer_nvme_ratio": 0.5}
    in_host, in_files = (
        resolve(config.zero, config.precision)
        for config in (make_run(**shared, offload_gradients_nvme=moved) for moved in (False, True))
    )
    numel, ranks = 1 << 13, 2
    share = numel // ranks * 3 // 8
    for plan, host, files in ((in_host, 2 * share, 0), (in_files, share, share)):
        found = {home: model_state_bytes(plan, numel, ranks, home) for home in Home}
        assert (found[Home.HOST].gradients, found[Home.FILE].gradients) == (2 * host, 2 * files)
        assert found[Home.FILE].master == 4 * share and found[Home.FILE].moments == 8 * share
    assert resolve(make_run(offload_gradients_nvme=True).zero, make_run().precision).gradient.home is Home.DEVICE


def test_nobody_else_knows_stages() -> None:
    """Within the engine only the plan reads the stage number, which it turns into placements."""
    folder = Path(megazero.__file__).parent / "zero"
    knows = {path.name for path in folder.rglob("*.py") if re.search(r"\bzero_stage\b|\bstage\s*==", path.read_text())}
    assert knows == {"plan.py"}
