"""Tests of the comparison with other systems: agreement of losses, ratios of times, and the program at a small size."""

import json
import math
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import systems
import torch
from compare import NOT_INSTALLED, Comparison, Run, failures_of, main, parse_arguments, threads, work_of
from jobs import Job
from plain_gpt import hollow_gpt, plain_gpt
from standings import body_of, difference, record
from support.processes import mesh_in_worker, run_ranks
from systems import Work, missing, storage_bytes
from turns import Held, Traffic, Turn

from megazero.config.model import ModelConfig

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 120 --rounds 2 --steps 2"
    " --device cpu"
)
LLAMA = (
    "--preset llama3-8b --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2"
    " --ffn-hidden-size 48 --seq-length 16 --vocab-size 120 --rounds 2 --steps 2 --device cpu"
)
MODEL = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=4, vocab_size=128)
PLAIN = [5.0, 4.0, 3.0, 2.0]


def turns(losses: list[float], seconds: list[float]) -> list[list[Turn]]:
    """Return the turns of two processes, two steps each: the second is a tenth slower, their mean losses as given."""
    first = [Turn([loss - 0.5 for loss in losses[at : at + 2]], seconds[at : at + 2], 1.0) for at in (0, 2)]
    second = [
        Turn([loss + 0.5 for loss in losses[at : at + 2]], [1.1 * s for s in seconds[at : at + 2]], 2.0)
        for at in (0, 2)
    ]
    return [list(ranks) for ranks in zip(first, second, strict=True)]


def run(losses: list[float], seconds: float) -> Run:
    warm_up = [100.0, 100.0]
    return Run(turns(losses, [*warm_up, seconds, 2 * seconds]), [Held(10, 160, 40, 2), Held(20, 80, 20, 2)])


def comparison(precision: str = "fp32", **runs: Run) -> Comparison:
    names = {name.replace("_", "-"): one for name, one in runs.items()}
    return Comparison(Work(MODEL, 2, precision, 2), "1 x 8", 1, "cpu", 2, PLAIN, names)


def test_differences_are_relative_and_at_any_step() -> None:
    assert difference([5.0, 4.0], PLAIN) == 0
    assert difference([5.0, 4.2, 3.0], PLAIN) == pytest.approx(0.05)
    assert difference([], PLAIN) == difference([*PLAIN, 1.0], PLAIN) == math.inf
    assert difference([5.0, math.nan], PLAIN) == difference([math.inf, 4.0], PLAIN) == math.inf


def test_who_trains_something_else_has_no_part_in_ratios() -> None:
    wrong = run([5.0, 4.0, 3.0, 2.00005], 0.5)
    found = comparison(ddp=run(PLAIN, 1.0), megazero_0=wrong, floor=run([5.0, 1.0, 1.0, 1.0], 0.5))
    assert found.differs("megazero-0") and not found.differs("ddp") and not found.differs("floor")
    assert not found.is_sound
    assert (found.ratio("megazero-0", "ddp"), found.ratio("ddp", "megazero-0")) == (None, None)
    assert found.ratio("floor", "ddp") == pytest.approx(0.5)
    made = record(found, 10)
    assert made["systems"]["megazero-0"]["verdict"] == "differs" and made["systems"]["ddp"]["verdict"] == "agrees"
    assert made["ratios"]["to_base"]["megazero-0"] is None
    [row] = [line for line in body_of(made).splitlines() if line.startswith("| megazero-0")]
    assert row.split(" | ")[3] == "differs"
    assert not comparison("bf16", ddp=run(PLAIN, 1.0), megazero_0=wrong).differs("megazero-0")


def test_what_a_system_needs_is_missing_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_is(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(systems, "version", none_is)
    assert [missing(name) for name in systems.TOGETHER] == [systems.PACKAGES.get(name) for name in systems.TOGETHER]
    assert missing("megatron-core-1") == "megatron.core" and missing("ddp") is None
    monkeypatch.setattr(systems, "version", lambda package: "1")
    assert not any(map(missing, systems.TOGETHER))


def test_rounding_may_grow_but_not_begin_large() -> None:
    """Over 20 steps a loss that is off by 1e-4 counts as rounding at the end but not at the beginning."""
    plain = [5.0] * 20

    def differs(step: int, by: float) -> bool:
        losses = [*plain[:step], 5.0 * (1 + by), *plain[step + 1 :]]
        one = Run([[Turn(losses, [1.0] * 20, 20.0)] * 2], [])
        found = Comparison(Work(MODEL, 2, "fp32", 2), "1 x 8", 1, "cpu", 20, plain, {"ddp": one})
        return found.differs("ddp")

    assert [differs(3, 1e-4), differs(18, 1e-4), differs(18, 1e-2)] == [True, False, True]


def test_a_base_that_differs_is_none() -> None:
    found = comparison(ddp=run([5.0, 4.0, 3.0, math.nan], 1.0), megazero_0=run(PLAIN, 1.0))
    assert found.base is None and found.best_peer("megazero-0") is None
    assert "| differs |" in body_of(record(found, 10))


def test_the_best_peer_is_the_fastest_that_is_there_and_agrees() -> None:
    wrong, gone = run([1.0] * 4, 0.1), Run(refused=NOT_INSTALLED)
    peers = {"zero1_torch": run(PLAIN, 0.8), "deepspeed_1": run(PLAIN, 0.7), "deepspeed_2": wrong}
    found = comparison(ddp=run(PLAIN, 1.0), fsdp2=gone, megazero_1=run(PLAIN, 0.35), megazero_3=run(PLAIN, 1), **peers)
    assert found.best_peer("megazero-1") == "deepspeed-1" and found.best_peer("megazero-3") is None
    ratios = record(found, 10)["ratios"]
    assert ratios["to_best_peer"] == {"megazero-1": {"peer": "deepspeed-1", "ratio": pytest.approx(0.5)}}
    assert ratios["to_base"]["megazero-1"] == pytest.approx(0.35)


def test_figures_are_of_the_slowest_and_fullest_process_without_the_warm_up() -> None:
    system = record(comparison(ddp=run(PLAIN, 1.0)), 10)["systems"]["ddp"]
    assert system["step_seconds"] == pytest.approx([1.1, 2.2]) and system["turn_seconds_per_step"] == [1.0]
    assert system["median_step_seconds"] == pytest.approx(1.65)
    assert system["tokens_per_second"] == pytest.approx(2 * 2 * 4 / 1.65)
    assert system["losses"] == pytest.approx(PLAIN)
    assert (system["peak_bytes"], system["state_bytes_per_parameter"], system["sent_in_4p"]) == (20, 16.0, 1.0)


def test_what_is_missing_or_fails_is_told() -> None:
    missing, failed = Run(refused=NOT_INSTALLED), Run(refused="failed: KeyError: 'x'")
    assert comparison(ddp=run(PLAIN, 1.0), deepspeed_0=missing).is_sound
    runs = {"ddp": Run()}
    with failures_of("ddp", runs):
        raise RuntimeError("process 0 of 2 failed:\nTraceback\nKeyError: 'x'\n")
    assert runs["ddp"] == failed
    found = comparison(ddp=run(PLAIN, 1.0), deepspeed_0=failed)
    assert not found.is_sound
    assert "| deepspeed-0 | failed: KeyError: 'x' |" in body_of(record(found, 10))


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    alone = ["eager", "compiled", "library", "megazero"]
    assert parse_arguments(["--world-size", "1"]).systems == alone
    preset = work_of(parse_arguments(["--preset", "gpt2-124m", "--num-layers", "2"])).model
    assert (preset.num_layers, preset.hidden_size, preset.vocab_size, preset.hidden_dropout) == (2, 768, 50304, 0.0)
    assert threads(1) >= threads(2) >= threads(10_000) == 1
    wrong = (
        "--systems eager",
        "--rounds 1",
        "--precision fp8",
        "--num-attention-heads 5",
        "--preset bloom-560m",
        "--preset llama3-8b --num-query-groups 5",
    )
    for words in wrong:
        with pytest.raises(SystemExit):
            parse_arguments(words.split())
    told = capsys.readouterr().err
    assert "for this model and so many processes there are floor, ddp" in told
    assert "the plain model has no --embed-layernorm True, --position-embedding-type alibi" in told


def test_a_preset_of_llama_is_no_gpt_2() -> None:
    options = parse_arguments(LLAMA.split())
    work = work_of(options)
    assert "megatron-core" not in options.systems and "deepspeed-3" in options.systems
    assert work.flags() | {"normalization": "RMSNorm", "num_query_groups": 2, "swiglu": True} == work.flags()
    # The embedding and the head; a block's two norms, queries and output, keys and values, and three inner layers.
    block = 2 * 32 + 2 * 32 * 32 + 2 * 2 * 8 * 32 + 3 * 48 * 32
    assert sum(p.numel() for p in hollow_gpt(work.model).parameters()) == 2 * 128 * 32 + 2 * block + 32


def test_the_plain_model_is_gpt_2_with_the_seeds_values() -> None:
    cpu = torch.device("cpu")
    model, other = plain_gpt(MODEL, 1, cpu), plain_gpt(MODEL, 2, cpu)
    assert sum(p.numel() for p in hollow_gpt(MODEL).parameters()) == 128 * 8 + 4 * 8 + 12 * 64 + 13 * 8 + 2 * 8
    assert not torch.equal(model.embedding["word"].weight, other.embedding["word"].weight)
    tokens = torch.randint(128, (2, 4))
    loss = model(tokens, tokens)
    assert loss.item() == pytest.approx(math.log(128), rel=0.05)
    changed = tokens.clone()
    changed[:, -1] += 1
    hidden = [model.layers["0"](model.embedding["word"](ids))[:, :-1] for ids in (tokens, changed % 128)]
    assert torch.equal(*hidden), "attention sees the future"


def test_storages_count_once() -> None:
    flat = torch.zeros(6)
    assert storage_bytes([flat, flat[:2], flat[3:].view(3, 1), torch.zeros(5, dtype=torch.bfloat16)]) == 24 + 10


def watched(rank: int) -> tuple[int, int]:
    """Return the bytes and messages that one of 3 processes sends in six collectives of 6 elements and a barrier.

    The first one is a gather of megazero's through shared memory.
    """
    traffic, whole, part = Traffic(3), torch.ones(6), torch.ones(2)
    axis = mesh_in_worker(rank, dp=3, is_late=False).axis("dp")
    with traffic:
        axis.all_gather_into(whole, part).wait()
        torch.distributed.all_reduce(whole)
        torch.distributed.all_gather_single(whole, part)
        torch.distributed.all_gather([torch.empty(2) for _ in range(3)], part)
        torch.distributed.reduce_scatter_single(part, whole)
        torch.distributed.broadcast(whole, 0)
        torch.distributed.barrier()
    return traffic.sent, traffic.messages


@pytest.mark.gloo
def test_traffic_is_counted_by_formula() -> None:
    assert run_ranks(3, watched) == [(6 * 16 + 16, 5 + 2)] * 3


@pytest.mark.gloo
def test_the_program(tmp_path: Path) -> None:
    """All systems have the plain model's losses on real processes, and the record has the figures of every system."""
    names = ["floor", "ddp", "fsdp2", "library-3", "megazero-3"]
    words = [*TINY.split(), "--systems", *names, "--output", str(tmp_path / "out.md")]
    assert main(words) == 0
    made: dict[str, Any] = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert list(made["systems"]) == names and made["world_size"] == 2 and made["model"]["vocab_size"] == 128
    for name, system in made["systems"].items():
        assert len(system["losses"]) == 4 and len(system["step_seconds"]) == 2
        if name != "floor":
            assert system["losses"] == pytest.approx(made["plain_losses"], rel=1e-5)
        assert system["peak_bytes"] > 0
    states = {name: system["state_bytes_per_parameter"] for name, system in made["systems"].items()}
    expected = {"floor": 16, "ddp": 16, "fsdp2": 8, "library-3": 8, "megazero-3": 8}
    assert states == pytest.approx(expected, rel=0.05)
    sent = {name: system["sent_in_4p"] for name, system in made["systems"].items()}
    block = (12 * 32**2 + 13 * 32) / made["model"]["num_parameters"]  # it stays from forward to backward, with the norm
    assert (
        sent["floor"] == 0
        and sent["ddp"] == pytest.approx(1, abs=0.02)
        and sent["megazero-3"] == pytest.approx(1.5 - block / 2, abs=0.02)
    )
    assert set(made["ratios"]["to_base"]) == set(names)
    assert set(made["ratios"]["to_best_peer"]) == {"library-3", "megazero-3"}
    assert "| megazero-3 |" in (tmp_path / "out.md").read_text(encoding="utf-8")


@pytest.mark.gloo
@pytest.mark.parametrize(("package", "precision"), [("megatron", "bf16"), ("deepspeed", "fp32"), ("deepspeed", "bf16")])
def test_who_is_no_part_of_torch(package: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed system trains the same and holds the bytes of its stage; in bf16 with fp32 master weights."""
    states = {
        "megatron": {"megatron-core-1": (12, 12)},
        "deepspeed": {
            "deepspeed-0": (16, 20),
            "deepspeed-1": (14, 11),
            "deepspeed-2": (14, 11),
            "deepspeed-3": (12, 10),
        },
    }[package]
    if missing(next(iter(states))) is not None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # Megatron compiles small functions, which takes ten seconds
    words = f"{TINY} --steps 8 --precision {precision} --output {tmp_path / 'out.md'} --systems".split()
    assert main([*words, *states]) == 0
    trained = json.loads((tmp_path / "out.json").read_text())["systems"]
    assert {name: system["verdict"] for name, system in trained.items()} == dict.fromkeys(states, "agrees")
    for name, (fp32, bf16) in states.items():
        expected, bound = (fp32, 2e-6) if precision == "fp32" else (bf16, 4e-4)
        assert trained[name]["loss_difference"] < bound
        assert trained[name]["state_bytes_per_parameter"] == pytest.approx(expected, rel=0.05)


@pytest.mark.gloo
def test_one_process_and_a_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compare.threads", lambda world_size: 1)
    words = f"{LLAMA} --world-size 1 --systems eager library megazero --time-limit 0 --rounds 9"
    assert main([*words.split(), "--output", str(tmp_path / "out.md")]) == 0
    made = json.loads((tmp_path / "out.json").read_text())
    systems = made["systems"]
    for name in ("library", "megazero"):
        assert systems[name]["losses"] == pytest.approx(systems["eager"]["losses"], rel=1e-5)
    assert made["turns"] == 2, "a warm-up and what counts, whatever the limit"


@pytest.mark.gloo
def test_a_job_that_stays_answers_until_it_fails() -> None:
    job = Job(2, list, device="cpu")  # `ask` calls methods of the list of the place's three fields
    assert job.ask("__len__") == job.ask("__len__") == [3, 3]
    with pytest.raises(RuntimeError, match="IndexError: pop index out of range"):
        job.ask("pop", 3)
    job.end()
