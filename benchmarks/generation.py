"""Times generation with and without the cache of keys and values, beside transformers' `generate`, in turns.

    python benchmarks/generation.py [--preset gpt2-124m] [--texts 1 4] [--tensor-model-parallel-size 2] \\
        [--output FILE.md]

Every system continues the same prompts greedily, with the first values of a model as weights; on several processes
there is no transformers.  Times are a text's whole, its prompt included.  Beside tokens a second stand CPU seconds of a
token on one process, which other programs on the machine change less.  The record goes to a .json beside --output.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jobs import Place, run_job
from report import Column, argument_parser, described, heading, new_record, paragraph, publish, table_of
from steps import configuration_of

from megazero.comm.startup import make_mesh
from megazero.config import derived
from megazero.config.model import ModelConfig
from megazero.config.presets import PRESETS
from megazero.generate.choice import choose
from megazero.generate.model_layout import padded_rows, stage_chunks
from megazero.generate.sampling import Sampling
from megazero.generate.session import Session
from megazero.memory.fused_buffers import FusedBuffers
from megazero.model.gpt import GPT
from megazero.model.initial_values import initialize_
from megazero.parallel.topology import Topology
from megazero.tensor_parallel.layers import TensorParallel
from megazero.tensor_parallel.random import RandomRegions

GREEDY = Sampling(greedy=True)
Continue = Callable[[list[list[int]], int], list[list[int]]]


class Work(NamedTuple):
    """What every system does: continue so many texts by `new` tokens, from prompts of `prompt` tokens."""

    texts: Sequence[int]
    prompt: int
    new: int
    rounds: int


class Timing(NamedTuple):
    """The seconds of every turn, on the clock and on the CPU, and the tokens of one."""

    seconds: list[float]
    cpu_seconds: list[float]
    tokens: int

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens_per_second": self.tokens / statistics.median(self.seconds),
            "cpu_seconds_per_token": statistics.median(self.cpu_seconds) / self.tokens,
            "step_seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
        }


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--preset", choices=sorted(PRESETS), help="a model by name, whose sizes win over those below")
    add("--num-layers", type=int, default=8, help="blocks")
    add("--hidden-size", type=int, default=256, help="width")
    add("--num-attention-heads", type=int, default=4, help="attention heads")
    add("--seq-length", type=int, default=1024, help="positions of the model")
    add("--vocab-size", type=int, default=4096, help="rows of the embedding")
    add("--texts", type=int, nargs="+", default=[1, 4], help="texts that are continued at the same time")
    add("--prompt-tokens", type=int, default=128, help="tokens of a prompt")
    add("--new-tokens", type=int, default=32, help="tokens behind each prompt")
    add("--rounds", type=int, default=3, help="turns of every system")
    add("--tensor-model-parallel-size", type=int, default=1, help="processes that share every layer")
    add("--pipeline-model-parallel-size", type=int, default=1, help="pipeline stages")
    return parser.parse_args(words)


def configure(options: argparse.Namespace) -> ModelConfig:
    """Return the model that is timed."""
    words = ["--micro-batch-size", "1"]
    if options.preset is not None:
        return configuration_of([*words, "--preset", options.preset], 1).model
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size"):
        words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return configuration_of(words, 1).model


def make_session(config: ModelConfig, place: Place, layout: Topology) -> Session:
    """Make this process's part of the model in float32, with the first values of seed 1."""
    mesh = make_mesh(layout, place.launch.rank, place.device, FusedBuffers(0, place.device))
    assert config.vocab_size is not None, "made-up samples have a stated vocabulary"
    random = RandomRegions(1, mesh.coordinate("tp"), place.device)
    model = GPT(
        config,
        vocab_size=config.vocab_size,
        tp=TensorParallel(mesh.axis("tp"), random, torch.float32, place.device),
        padded_vocab_size=padded_rows(config.vocab_size, layout),
        chunks=stage_chunks(config, config.vocab_size, stage=mesh.coordinate("pp"), layout=layout),
    )
    initialize_(model, 1)
    return Session(model, mesh)


def systems_of(config: ModelConfig, session: Session, place: Place, layout: Topology) -> dict[str, Continue]:
    """Return the systems by name, functions from prompts and a number of tokens to that many tokens behind each."""

    def with_cache(prompts: list[list[int]], new: int) -> list[list[int]]:
        found = session.generate(prompts, sampling=GREEDY, max_new_tokens=new, batch_size=len(prompts))
        return [continuation.tokens for (continuation,) in found]

    def without_cache(prompts: list[list[int]], new: int) -> list[list[int]]:
        tokens = torch.tensor(prompts)
        mesh = session._mesh
        for _ in range(new):
            chosen = choose(mesh, session.next_logits(tokens), GREEDY, [torch.Generator()] * len(prompts))
            tokens = torch.cat((tokens, torch.tensor(chosen).unsqueeze(1)), dim=1)
        return tokens[:, -new:].tolist()

    found = {"megazero": with_cache, "megazero without a cache": without_cache}
    if layout.world_size == 1 and derived.num_key_value_heads(config) == config.num_attention_heads:
        found["transformers"] = transformers_generate(config, place.device)
    return found


def transformers_generate(config: ModelConfig, device: torch.device) -> Continue:
    """Return transformers' GPT-2 of these sizes, which has a cache too, with values of its own."""
    import transformers

    sizes = {"n_embd": config.hidden_size, "n_layer": config.num_layers, "n_head": config.num_attention_heads}
    theirs = transformers.GPT2Config(vocab_size=config.vocab_size, n_positions=config.seq_length, **sizes)
    model = transformers.GPT2LMHeadModel(theirs).to(device).eval()

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=device)
        with torch.inference_mode():
            rows = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return rows[:, -new:].tolist()

    return generate


def measure(place: Place, config: ModelConfig, layout: Topology, work: Work) -> dict[str, Timing]:
    """Time every system for every number of texts in turns, after a short turn that doesn't count."""
    session = make_session(config, place, layout)
    systems = systems_of(config, session, place, layout)
    generator = torch.Generator().manual_seed(1)
    assert config.vocab_size is not None, "made-up samples have a stated vocabulary"
    prompts = torch.randint(config.vocab_size, (max(work.texts), work.prompt), generator=generator).tolist()
    timings: dict[str, Timing] = {}
    for system in systems.values():
        system(prompts[:1], 2)
    for _ in range(work.rounds):
        for texts in work.texts:
            expected = None
            for name, system in systems.items():
                kept = timings.setdefault(f"{name}, {texts} x", Timing([], [], texts * work.new))
                started, cpu_started = time.perf_counter(), time.process_time()
                tokens = system(prompts[:texts], work.new)
                kept.seconds.append(time.perf_counter() - started)
                kept.cpu_seconds.append(time.process_time() - cpu_started)
                assert [len(row) for row in tokens] == [work.new] * texts, f"{name} has ended early"
                if name != "transformers":
                    assert expected in (None, tokens), f"{name} has written something else"
                    expected = tokens
    return timings


COLUMNS = (
    Column("tokens a second", "tokens_per_second", ".1f"),
    Column("CPU seconds a token, ms", "cpu_seconds_per_token", ".1f", 1e3),
)


def body_of(kept: Mapping[str, Any]) -> str:
    """Return the table of a record."""
    return table_of(kept["systems"], COLUMNS, first="system, texts at the same time")


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    config = configure(options)
    layout = Topology(tp=options.tensor_model_parallel_size, pp=options.pipeline_model_parallel_size)
    work = Work(options.texts, options.prompt_tokens, options.new_tokens, options.rounds)
    timings = run_job(layout.world_size, measure, config, layout, work, device=options.device)[0]
    kept = new_record(
        "generation",
        options.device,
        model=described(config),
        precision="fp32",
        world_size=layout.world_size,
        layout=f"tensor {layout.tp}, pipeline {layout.pp}",
        prompt_tokens=work.prompt,
        new_tokens=work.new,
        systems={name: timing.to_json() for name, timing in timings.items()},
    )
    words_of_page = paragraph(
        f"Prompts of {work.prompt} tokens and {work.new} new ones, tensor {layout.tp} x pipeline {layout.pp}. Medians"
        f" of {work.rounds} turns:"
    )
    title = heading(f"Generation by {kept['model']['name']}", options.device)
    publish([title, words_of_page, body_of(kept)], options.output, kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
