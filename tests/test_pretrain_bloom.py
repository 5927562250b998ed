"""Tests of pretrain_bloom.py: the command line of pretrain_gpt.py with BLOOM's positions and embedding norm."""

import json
import subprocess
from pathlib import Path

from support.source_tree import ROOT
from support.warm_python import TOOLS, warm_python

# A published way to start one, with sizes and paths filled in, and the rest of what a run needs behind it.
WORDS = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
--micro-batch-size 2 --data-impl mmap --deepspeed --deepspeed_config CONFIG --zero-stage 1
--deepspeed-activation-checkpointing --distributed-backend gloo --sequence-parallel
--mock-data --vocab-size 100 --lr 1e-3 --train-iters 2 --eval-iters 0
"""


def test_blooms_own_command_line_starts_one(tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}))
    words = [str(config) if word == "CONFIG" else word for word in WORDS.split()]
    program = [warm_python(TOOLS), str(ROOT / "pretrain_bloom.py"), *words, "--print-config"]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert "position_embedding_type: alibi" in done.stdout and "embed_layernorm: true" in done.stdout
    assert (
        "embed_layernorm: false"
        in subprocess.run([*program, "--embed-layernorm", "false"], capture_output=True, text=True, check=True).stdout
    )
