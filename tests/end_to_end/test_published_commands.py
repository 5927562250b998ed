"""Published examples of Megatron-LM and Megatron-DeepSpeed train as they are, but for paths, sizes and the program."""

import json
from pathlib import Path

import pytest
from support.hugging_face_files import write_hugging_face_files
from support.launch import read_steps, run_torchrun
from support.token_files import write_corpus, write_gpt2_files

# The words of Megatron-LM's GPT-3 example in the order that it gives them; sizes stand for {}.
GPT_3 = """
--num-layers {2} --hidden-size {16} --num-attention-heads {4} --seq-length {16} --max-position-embeddings {16}
--attention-backend auto
--micro-batch-size 1 --global-batch-size {8} --step-batch-size-schedule {0:2 64:4 192:8} --train-iters {6}
--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5
--lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters {5}
--tensor-model-parallel-size {1} --pipeline-model-parallel-size {2}
--data-path DATA --vocab-file VOCAB --merge-file MERGES --split 949,50,1
--log-interval 100 --save-interval 10000 --eval-interval 1000 --save SAVED --load SAVED --eval-iters {1}
--tensorboard-dir FIGURES
"""
# Those of Megatron-LM's example of Llama 3 8B with 8-bit products.
LLAMA_3 = """
--use-mcore-models --num-layers {2} --hidden-size {64} --ffn-hidden-size {128} --num-attention-heads {4}
--group-query-attention --num-query-groups {2} --kv-channels {16} --seq-length {32} --max-position-embeddings {32}
--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
--swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights
--disable-bias-linear --micro-batch-size 1 --global-batch-size {8} --train-samples {48} --lr-decay-samples {40}
--lr-warmup-samples {8} --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
--lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
--grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
--exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather
--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel --mock-data --tokenizer-type NullTokenizer
--vocab-size {256} --data-cache-path CACHE --tiktoken-pattern v2 --split '99,1,0'
--no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters {1}
--eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4 --profile-step-end 6
--ckpt-format torch_dist --distributed-timeout-minutes 60 --save SAVED --load SAVED --tensorboard-dir FIGURES
"""
# Those of Megatron-DeepSpeed's example of Llama 2, and its configuration.
LLAMA_2 = """
--tensor-model-parallel-size 2 --pipeline-model-parallel-size {1} --num-layers {2} --hidden-size {64}
--ffn-hidden-size {128} --num-attention-heads {8} --micro-batch-size {2} --global-batch-size {8} --seq-length {32}
--max-position-embeddings {32} --train-iters {6} --save SAVED --load SAVED --data-path 1 DATA --data-impl mmap
--tokenizer-type {GPT2BPETokenizer} --vocab-file VOCAB --merge-file MERGES --split 949,50,1 --lr 3e-4
--lr-decay-style cosine --min-lr 3e-5 --weight-decay 0.1 --clip-grad 1 --lr-warmup-iters {2} --optimizer adam
--adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1 --save-interval 10000 --eval-interval 1000 --eval-iters {1} --bf16
--no-query-key-layer-scaling --attention-dropout 0 --hidden-dropout 0 --use-rotary-position-embeddings
--untie-embeddings-and-output-weights --swiglu --normalization rmsnorm --disable-bias-linear --num-key-value-heads 4
--tensorboard-dir FIGURES --zero-stage=0 --deepspeed_config=LLAMA_CONFIG --deepspeed
"""
# Those of BLOOM-176B's training, and its configuration; the groups of corpora stand in files of their own.
BLOOM = """
--tensor-model-parallel-size {2} --pipeline-model-parallel-size {2} --pp-partition-method type:transformer|embedding
--num-layers {2} --hidden-size {32} --num-attention-heads {4} --seq-length {16} --max-position-embeddings {16}
--micro-batch-size {1} --rampup-batch-size {2 2 10} --global-batch-size {4} --train-samples {20}
--tokenizer-type PretrainedFromHF --tokenizer-name-or-path TOKENIZER --init-method-std 0.0048 --embed-layernorm --bf16
--seed 42 --position-embedding-type alibi --checkpoint-activations --abort-on-unmet-fused-kernel-constraints
--kill-switch-path KILL --pad-vocab-size-to {512} --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8
--lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine --lr-decay-samples {16} --lr-warmup-samples {4} --clip-grad 1.0
--weight-decay 1e-1 --exit-duration-in-mins 5990 --log-interval 1 --save-interval {3} --eval-interval {4} --eval-iters 1
--tensorboard-dir FIGURES --tensorboard-queue-size 5 --log-timers-to-tensorboard --log-batch-size-to-tensorboard
--log-validation-ppl-to-tensorboard --save SAVED --load SAVED --train-weighted-split-paths-path TRAIN
--valid-weighted-split-paths-path VALID --num-workers 2 --valid-num-workers 0 --data-impl mmap
--distributed-backend nccl --deepspeed --deepspeed_config BLOOM_CONFIG --zero-stage 0
--deepspeed-activation-checkpointing
"""
# Those of StarCoder's training but for Weights & Biases; attention has one head of keys and values.
STARCODER = """
--tensor-model-parallel-size {2} --pipeline-model-parallel-size {1} --sequence-parallel --num-layers {2}
--hidden-size {32} --num-attention-heads {4} --attention-head-type multiquery --init-method-std 0.01275
--seq-length {16} --max-position-embeddings {16} --attention-dropout 0.1 --hidden-dropout 0.1 --micro-batch-size {2}
--global-batch-size {8} --lr 0.0003 --min-lr 0.00003 --train-iters {6} --lr-decay-iters {6} --lr-decay-style cosine
--lr-warmup-iters {2} --weight-decay .1 --adam-beta2 .95 --clip-grad 1.0 --bf16 --use-flash-attn --fim-rate 0.5
--log-interval 10 --save-interval 2500 --eval-interval 2500 --eval-iters 2 --use-distributed-optimizer
--valid-num-workers 0 --tokenizer-type TokenizerFromFile --tokenizer-file CODE --save SAVED --load SAVED
--train-weighted-split-paths-path TRAIN --valid-weighted-split-paths-path VALID --structured-logs
--structured-logs-dir LOGS --tensorboard-dir FIGURES
"""
BLOOM_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "train_batch_size": 4,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0},
    "bf16": {"enabled": True},
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
LLAMA_CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 1,
    "zero_optimization": {"stage": 0},
    "bf16": {"enabled": True},
}
# Those of Megatron-DeepSpeed's example of a GPT of 125M under ZeRO, and its configuration.
ZERO = """
--override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95 --tensor-model-parallel-size 1 --init-method-std 0.02
--lr-decay-tokens {1200} --lr-warmup-tokens {100} --micro-batch-size {2} --exit-duration-in-mins 30000000
--global-batch-size {8} --num-layers {2} --hidden-size {16} --num-attention-heads {4} --seq-length {16}
--max-position-embeddings {16} --train-tokens {768} --train-samples {144} --lr 6.0e-4 --min-lr 1.0e-6
--lr-decay-style cosine --split 949,50,1 --log-interval {1} --eval-interval {100} --eval-iters {1} --save-interval 10000
--weight-decay 0.1 --clip-grad 1.0 --hysteresis 2 --num-workers 0 --fp16 --seed 1234 --load SAVED --save SAVED
--no-async-tensor-model-parallel-allreduce --tensorboard-queue-size 1 --log-timers-to-tensorboard
--log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard --tensorboard-dir FIGURES --checkpoint-activations
--log-optimizer-states-to-tensorboard --vocab-file VOCAB --merge-file MERGES --data-path DATA --data-impl mmap
--deepspeed --deepspeed_config CONFIG --zero-stage 2 --pipeline-model-parallel-size 1 --no-pipeline-parallel
--deepspeed-activation-checkpointing
"""
CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 1,
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 1.0,
    "prescale_gradients": True,
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
        "initial_scale_power": 11,
    },
    "bf16": {"enabled": False},
    "wall_clock_breakdown": False,
}


def words_of(text: str, folder: Path) -> list[str]:
    """Return a command line with paths in `folder`, where its files are."""
    vocabulary, merges = write_gpt2_files(folder, [("a", "b")])
    documents = [[[(document + place) % 250 for place in range(60)]] for document in range(60)]
    (folder / "ds_config.json").write_text(json.dumps(CONFIG))
    (folder / "llama.json").write_text(json.dumps(LLAMA_CONFIG))
    (folder / "bloom.json").write_text(json.dumps(BLOOM_CONFIG))
    (folder / "tokenizer").mkdir()
    code = write_hugging_face_files(folder / "tokenizer", "byte-level")
    code.add_special_tokens(["<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"])
    code.save(str(folder / "code.json"))
    data, other = (write_corpus(folder / name, documents) for name in ("text_document", "code_text_document"))
    mixture = f"0.7 {{0}} {data}, 0.3 {{0}} {other}"
    train = f'"train: {mixture.format("0:0.950")}"\n'
    valid = f'"valid: {mixture.format("0.950:1.0")}" "valid_code: 1 0.950:1.0 {other}"\n'
    (folder / "train-splits.txt").write_text(train)
    (folder / "valid-splits.txt").write_text(valid)
    paths = {
        **{"DATA": data, "VOCAB": vocabulary, "MERGES": merges, "TOKENIZER": str(folder / "tokenizer")},
        **{"TRAIN": str(folder / "train-splits.txt"), "VALID": str(folder / "valid-splits.txt")},
        **{"BLOOM_CONFIG": str(folder / "bloom.json"), "KILL": str(folder / "kill-switch")},
        **{"CODE": str(folder / "code.json"), "LOGS": str(folder / "logs")},
        **{
            "SAVED": str(folder / "saved"),
            "FIGURES": str(folder / "figures"),
            "CONFIG": str(folder / "ds_config.json"),
            "--deepspeed_config=LLAMA_CONFIG": f"--deepspeed_config={folder / 'llama.json'}",
            "CACHE": str(folder / "cache"),
        },
    }
    return [paths.get(word, word) for word in text.replace("{", "").replace("}", "").split()]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("text", "consumed"),
    [
        (GPT_3, [2, 4, 8, 12, 20, 28]),
        *((text, [8, 16, 24, 32, 40, 48]) for text in (ZERO, LLAMA_3, LLAMA_2, STARCODER)),
    ],
    ids=["GPT-3", "ZeRO", "Llama 3", "Llama 2", "StarCoder"],
)
def test_a_published_example_trains(text: str, consumed: list[int], tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    words = [*words_of(text, tmp_path), "--metrics-file", str(metrics)]
    finished = run_torchrun(words, ranks=2, folder=tmp_path)
    assert finished.code == 0, finished.stderr
    assert [step["consumed_samples"] for step in read_steps(metrics).values()] == consumed
    assert list((tmp_path / "saved").glob("step_*6")) and list((tmp_path / "figures").iterdir())


@pytest.mark.gloo
def test_blooms_command_trains_on_4_processes_and_goes_on(tmp_path: Path) -> None:
    """Its batch grows, and each of its groups of corpora is evaluated by itself."""
    metrics = tmp_path / "metrics.jsonl"
    words = [*words_of(BLOOM, tmp_path), "--metrics-file", str(metrics)]
    began = run_torchrun([*words, "--exit-interval", "3"], ranks=4, folder=tmp_path)
    assert began.code == 0, began.stderr
    finished = run_torchrun(words, ranks=4, folder=tmp_path)
    assert finished.code == 0, finished.stderr
    assert [step["consumed_samples"] for step in read_steps(metrics).values()] == [2, 4, 6, 8, 10, 14, 18]
    evaluated = [json.loads(line)["evaluation"] for line in metrics.read_text().splitlines() if '"evaluation"' in line]
    assert [(each["iteration"], each["split"], each["group"]) for each in evaluated] == [
        (iteration, "validation", group) for iteration in (4, 7) for group in ("valid", "valid_code")
    ]
    assert "validation valid_code loss at iteration 7 | lm loss value: " in finished.stdout
