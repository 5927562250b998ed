"""Tests of the campaign of random programs: it finds no difference in a dozen, and finds what is planted."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from program_players import EnginePlayer
from random_programs import judge, main, shortened
from rank_threads import Deadlock, RankLeft, run_ranks
from torch import nn
from user_programs import KINDS, WRITES, draw

from megazero.comm.mesh import Mesh
from megazero.zero.parameters.written import WrittenParameters


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def program(*acts: dict[str, Any], kind: str = "plain", stage: int = 1, world: int = 2) -> dict[str, Any]:
    settings = {"kind": kind, "seed": 5, "stage": stage, "accumulation": 1, "clip": 0.0, "optimizer": "AdamW"}
    settings |= {"bucket": 16, "persists": 0, "sums": False, "alike": True, "zero": {}}
    placed = [{"module": 0, **act} for act in acts]
    return {"number": 0, "precision": "fp64", "world": world, "modules": [settings], "acts": placed}


MICRO = {"act": "micro", "seed": 9, "how": "engine"}
STEP = {"act": "step"}
WRITE = {"act": "write", "seed": 21, "how": "data =", "where": "all", "first": 0, "stride": 1}


def test_a_dozen_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--records", str(tmp_path / "r.jsonl"), "--first", "40", "--output", str(tmp_path / "page.md")]
    assert main([*words, "--programs", "12"]) == 0
    records = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert {record["number"] for record in records} == set(range(40, 52))
    assert "| equal |" in (tmp_path / "page.md").read_text()
    failed = {**records[0], "outcome": "! other numbers", "text": "act 1: a difference"}
    (tmp_path / "r.jsonl").write_text(json.dumps(failed) + "\n")
    assert main([*words, "--programs", "1"]) == 1, "a program that has a record is not played again"
    assert "act 1: a difference" in capsys.readouterr().out


def test_a_program_is_drawn_from_its_number_alone() -> None:
    assert draw(7) == draw(7) != draw(8)
    acts = {act["act"] for number in range(300) for act in draw(number)["acts"]}
    assert all(hasattr(EnginePlayer, act.replace(" ", "_")) or act == "resume" for act in acts)
    ways = {act["how"] for number in range(300) for act in draw(number)["acts"] if act["act"] == "write"}
    assert ways == {*WRITES, "engine.load_state_dict"}
    assert {module["kind"] for number in range(100) for module in draw(number)["modules"]} == set(KINDS)


def test_a_write_that_is_lost_is_found_and_the_program_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    played = program(MICRO, STEP, WRITE, {"act": "rate", "value": 0.02}, MICRO, STEP)
    assert judge(played)["outcome"] == "equal"
    monkeypatch.setattr(WrittenParameters, "_find", lambda self: ())
    record = judge(played)
    assert record["outcome"] == "! other numbers"
    shorter = shortened(played, record["outcome"])
    assert len(shorter["acts"]) < len(played["acts"]) and WRITE["how"] in [act.get("how") for act in shorter["acts"]]


def test_refusals_and_other_errors_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    freeze = {"act": "odd", "how": "freeze", "seed": 3, "first": 0, "stride": 1}
    record = judge(program(MICRO, freeze, STEP))
    assert record["outcome"] == "refused" and "requires_grad" in record["text"]
    bare = {"act": "odd", "how": "bare", "seed": 3, "first": 0, "stride": 1}
    assert judge(program(bare, stage=3))["outcome"] == "refused"

    def fails(self: Any, act: Any, one: Any) -> None:
        if self.rank == 1:
            raise ValueError("a bug")

    monkeypatch.setattr(EnginePlayer, "rate", fails)
    assert judge(program(MICRO, {"act": "rate", "value": 0.1}, STEP))["outcome"] == "! ValueError"


def test_threads_that_wait_for_nothing_get_an_error() -> None:
    def one_leaves(mesh: Mesh) -> None:
        if mesh.rank:
            mesh.world.barrier()

    assert [type(each) for each in run_ranks(2, one_leaves)] == [type(None), RankLeft]

    def crossed(mesh: Mesh) -> None:
        mesh.axis("dp" if mesh.rank else "world").barrier()

    ended = {type(each) for each in run_ranks(2, crossed)}  # the second one may find that the first has left
    assert Deadlock in ended and ended <= {Deadlock, RankLeft}

    def summed(mesh: Mesh) -> torch.Tensor:
        found, whole = torch.tensor([1.0, 2.0, 3.0]) * (mesh.rank + 1), torch.zeros(6)
        work = mesh.gathering.all_gather_into(whole[:6], found)
        mesh.axis("dp").all_reduce(found, "max").wait()
        work.wait()
        return torch.cat([whole, found])

    for result in run_ranks(2, summed):
        assert result.tolist() == [1, 2, 3, 2, 4, 6, 2, 4, 6]


def test_modules_take_what_others_give() -> None:
    for kind in KINDS:
        module: nn.Module = KINDS[kind]()
        assert module(module(torch.ones(2, 5))).shape == (2, 5)
