"""Each rule of a run is broken by its own row of the table and names the nearest legal values, which satisfy it."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.configs import SMALL, make_run
from support.each import each

from megazero.command_line.parse import parse
from megazero.config.validate import validate
from megazero.config.values import RawValue
from megazero.errors import Problem
from megazero.rules.run import RULES, advice, check

UNTRAINED = "--skip-train-iteration-range"


def only(world_size: int = 1, **settings: Any) -> Problem:
    found = check(make_run(**settings), world_size)
    assert len(found) == 1, found
    return found[0]


def test_a_valid_run_has_no_problem() -> None:
    assert check(make_run(), 1) == ()
    big = make_run(
        tensor_model_parallel_size=4, global_batch_size=64, precision="fp16", loss_scale=64, lr_warmup_fraction=0.1
    )
    assert check(big, 32) == ()


@each(
    ("world_size", "settings", "given", "legal"),
    [
        (
            1,
            {"hidden_size": 60, "num_attention_heads": 8},
            "--hidden-size 60 --num-attention-heads 8",
            "--num-attention-heads 6, --num-attention-heads 10, --hidden-size 56, --hidden-size 64",
        ),
        (
            2,
            {"tensor_model_parallel_size": 2, "pad_vocab_size_to": 99},
            "--pad-vocab-size-to 99 --vocab-size 100 --tensor-model-parallel-size 2",
            "--pad-vocab-size-to 100, --pad-vocab-size-to 102",
        ),
        (
            3,
            {"tensor_model_parallel_size": 3, "ffn_hidden_size": 33},
            "--tensor-model-parallel-size 3 --num-attention-heads 4",
            "--tensor-model-parallel-size 1",
        ),
        (
            2,
            {"tensor_model_parallel_size": 2, "ffn_hidden_size": 33},
            "--tensor-model-parallel-size 2 with feed-forward width 33",
            "--ffn-hidden-size 32, --ffn-hidden-size 34",
        ),
        (
            1,
            {"max_position_embeddings": 8},
            "--seq-length 16 --max-position-embeddings 8",
            "--seq-length 8, --max-position-embeddings 16",
        ),
        (
            2,
            {
                **{"curriculum_learning": True, "curriculum_steps": 5, "curriculum_seqlen_step": 3},
                **{"tensor_model_parallel_size": 2, "sequence_parallel": True, "micro_batch_size": 1},
            },
            "--curriculum-seqlen-step 3",
            "--curriculum-seqlen-step 2, --curriculum-seqlen-step 4",
        ),
        (
            1,
            {"curriculum_learning": True, "curriculum_steps": 5, "compile": "on"},
            "--compile on with --curriculum-learning",
            "--compile auto, --compile off, or leave out --curriculum-learning",
        ),
        (
            1,
            {
                **{"curriculum_learning": True, "curriculum_steps": 5},
                **{"lr_decay_tokens": 100, "lr_warmup_samples": 2},
            },
            "--lr-decay-tokens and --lr-warmup-samples",
            "all of them in tokens, or all in samples",
        ),
        (
            6,
            {"tensor_model_parallel_size": 4},
            "6 processes with --tensor-model-parallel-size 4 --pipeline-model-parallel-size 1",
            "4 processes, 8 processes, --tensor-model-parallel-size 2",
        ),
        (
            6,
            {"pipeline_model_parallel_size": 4},
            "6 processes with --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4",
            "4 processes, 8 processes, --pipeline-model-parallel-size 3",
        ),
        (
            8,
            {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 4},
            "8 processes with --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4",
            "16 processes, --tensor-model-parallel-size 2, --pipeline-model-parallel-size 2",
        ),
        (
            1,
            {"distributed_backend": "nccl", "device": "cpu"},
            "--distributed-backend nccl --device cpu",
            "--distributed-backend gloo, --device cuda",
        ),
        (
            1,
            {"reset_attention_mask": True, "attention_backend": "flash"},
            "--reset-attention-mask --attention-backend flash",
            "--attention-backend auto, --attention-backend fused",
        ),
        (
            1,
            {"reset_attention_mask": True, "attention_backend": "flash3", "attention_dropout": 0},
            "--reset-attention-mask --attention-backend flash3",
            "--attention-backend auto, --attention-backend fused",
        ),
        (
            1,
            {"attention_dropout": 0.1, "attention_backend": "flash3"},
            "--attention-backend flash3 --attention-dropout 0.1",
            "--attention-dropout 0, --attention-backend auto",
        ),
        (
            1,
            {"deterministic_mode": True, "attention_backend": "fused"},
            "--deterministic-mode --attention-backend fused",
            "--attention-backend auto, --attention-backend flash, --attention-backend efficient",
        ),
        (
            1,
            {"compile": "on", "ledger": True, "metrics_file": "run.jsonl"},
            "--compile on with --ledger",
            "--compile auto, --compile off, or leave out --ledger",
        ),
        (
            1,
            {"compile": "max", "ledger": True, "metrics_file": "run.jsonl"},
            "--compile max with --ledger",
            "--compile auto, --compile off, or leave out --ledger",
        ),
        (
            1,
            {"hierarchical_collectives": "auto", "deterministic_mode": True},
            "--hierarchical-collectives auto --deterministic-mode",
            "--hierarchical-collectives on or off, or leave out --deterministic-mode",
        ),
        (
            1,
            {"compile": "max", "deterministic_mode": True},
            "--compile max --deterministic-mode",
            "--compile on, or leave out --deterministic-mode",
        ),
        (
            2,
            {"compile": "max", "tensor_model_parallel_size": 2},
            "--compile max --tensor-model-parallel-size 2",
            "--sequence-parallel",
        ),
        (
            1,
            {"enable_cuda_graph": True, "device": "cuda", "compile": "off"},
            "--enable-cuda-graph --compile off",
            "--compile on",
        ),
        (
            1,
            {"enable_cuda_graph": True, "device": "cuda", "ledger": True, "metrics_file": "run.jsonl"},
            "--enable-cuda-graph with a ledger",
            "leave out --ledger and --ledger-limit",
        ),
        (
            2,
            {"enable_cuda_graph": True, "device": "cuda", "tensor_model_parallel_size": 2},
            "--enable-cuda-graph --tensor-model-parallel-size 2",
            "--tensor-model-parallel-size 1",
        ),
        (
            2,
            {"enable_cuda_graph": True, "device": "cuda", "pipeline_model_parallel_size": 2},
            "--enable-cuda-graph --pipeline-model-parallel-size 2",
            "--pipeline-model-parallel-size 1",
        ),
        (
            1,
            {"enable_cuda_graph": True, "device": "cuda", "zero_stage": 3},
            "--enable-cuda-graph --zero-stage 3",
            "--zero-stage 2",
        ),
        (
            1,
            {"enable_cuda_graph": True, "device": "cuda", "recompute_granularity": "selective"},
            "--enable-cuda-graph --recompute-granularity selective",
            "--recompute-granularity none",
        ),
        (
            1,
            {"enable_cuda_graph": True, "device": "cuda", "fp8_format": "hybrid", "precision": "bf16"},
            "--enable-cuda-graph --fp8-format hybrid",
            "leave out --enable-cuda-graph or --fp8-format",
        ),
        (
            1,
            {"enable_cuda_graph": True, "device": "cuda", "reset_position_ids": True},
            "--enable-cuda-graph --reset-position-ids",
            "leave out --enable-cuda-graph or --reset-position-ids",
        ),
        (
            1,
            {"enable_cuda_graph": True, "device": "cuda", "reset_attention_mask": True},
            "--enable-cuda-graph --reset-attention-mask",
            "leave out --enable-cuda-graph or --reset-attention-mask",
        ),
        (
            1,
            {"enable_cuda_graph": True, "device": "cuda", "curriculum_learning": True, "curriculum_steps": 5},
            "--enable-cuda-graph --curriculum-learning",
            "leave out --enable-cuda-graph or --curriculum-learning",
        ),
        (
            1,
            {"compile": "on", "ledger_limit": 64.5},
            "--compile on with --ledger-limit 64.5",
            "--compile auto, --compile off, or leave out --ledger-limit 64.5",
        ),
        (
            4,
            {"global_batch_size": 21},
            "--global-batch-size 21 with --micro-batch-size 2 on 4 data-parallel processes",
            "--global-batch-size 24, --global-batch-size 16",
        ),
        (4, {"global_batch_size": 3}, "--global-batch-size 3 with --micro-batch-size 2", "--global-batch-size 8"),
        (1, {"train_iters": None}, "neither --train-iters nor --train-samples", "--train-iters N"),
        (1, {"train_samples": 100}, "--train-iters 10 and --train-samples 100", "one of the two"),
        (4, {"train_iters": None, "train_samples": 7}, "--train-samples 7", "--train-samples 8"),
        (
            4,
            {"train_iters": None, "train_tokens": 100},
            "--train-tokens 100, which at --seq-length 16 are 6.25 samples",
            "--train-tokens 128",
        ),
        (
            4,
            {"rampup_batch_size": ["10", "6", "1M"], "global_batch_size": 40},
            "--rampup-batch-size 10 6 1M on 4 data-parallel processes with --micro-batch-size 2, sizes 10, 22, 28, 34",
            "--rampup-batch-size 8 8 1M, --rampup-batch-size 16 8 1M",
        ),
        (
            2,
            {"rampup_batch_size": ["32", "7", "100"], "global_batch_size": 64},
            "--rampup-batch-size 32 7 100",
            "an INCREMENT such as 1, --global-batch-size 67",
        ),
        (
            2,
            {"step_batch_size_schedule": ["0:8", "1K:14"]},
            "--step-batch-size-schedule 0:8 1K:14 on 2 data-parallel processes with --micro-batch-size 2, sizes 14",
            "12 or 16 for 14",
        ),
        (
            1,
            {"step_batch_size_schedule": ["0:8", "1K:14"], "global_batch_size": 12},
            "--global-batch-size 12 and --step-batch-size-schedule 0:8 1K:14",
            "--global-batch-size 14, or without it",
        ),
        (
            1,
            {"step_batch_size_schedule": ["0:8"], "rampup_batch_size": ["2", "2", "100"], "global_batch_size": None},
            "--rampup-batch-size 2 2 100 and --step-batch-size-schedule",
            "one of the two",
        ),
        *(
            (1, {"skip_train_iteration_range": word}, f"{UNTRAINED} {word}", f"{UNTRAINED} 8401-8800")
            for word in ("0-3", "0", "5-3", "-3-5", "2.5", "a-b", "1-2-3", "1_000-1_002")
        ),
        (
            1,
            {"skip_train_iteration_range": ["1", "3-5", "5-6"]},
            f"{UNTRAINED} 5-6 after step 5",
            "spans from 6 on, or this one before the others",
        ),
        (
            1,
            {"skip_train_iteration_range": ["4", "2-3"]},
            f"{UNTRAINED} 2-3 after step 4",
            "spans from 5 on, or this one before the others",
        ),
        (
            1,
            {"skip_train_iteration_range": ["2-3", "8-10"]},
            f"{UNTRAINED} 10 in a run of 10 steps",
            "spans that end at step 9, or a run of 11 steps or more",
        ),
        (
            1,
            {"skip_train_iteration_range": "40-50"},
            f"{UNTRAINED} 50 in a run of 10 steps",
            "spans that end at step 9, or a run of 51 steps or more",
        ),
        (
            1,
            {"skip_train_iteration_range": "3-4", "profile": True, "profile_step_start": 3, "profile_step_end": 9},
            f"--profile and {UNTRAINED} 3-4",
            "--profile-step-start 4 --profile-step-end 6",
        ),
        (
            1,
            {"decoupled_lr": 1e-5, "min_lr": 1e-4},
            "--decoupled-lr 1e-05 --min-lr 0.0001",
            "--decoupled-min-lr 1e-05, --decoupled-lr 0.0001",
        ),
        (
            1,
            {"decoupled_lr": 1e-5, "decoupled_min_lr": 2e-5},
            "--decoupled-lr 1e-05 --decoupled-min-lr 2e-05",
            "--decoupled-min-lr 1e-05, --decoupled-lr 2e-05",
        ),
        (
            1,
            {"decoupled_lr": 1e-5, "lr_warmup_init": 1e-4, "lr_warmup_iters": 2},
            "--decoupled-lr 1e-05 --lr-warmup-init 0.0001",
            "--lr-warmup-init 1e-05, --decoupled-lr 0.0001",
        ),
        (
            1,
            {"lr_decay_style": "WSD"},
            "--lr-decay-style WSD without --lr-wsd-decay-iters and --lr-wsd-decay-samples",
            "--lr-wsd-decay-iters N",
        ),
        (
            1,
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 9, "lr_warmup_iters": 2},
            "--lr-wsd-decay-iters 9",
            "--lr-wsd-decay-iters 8",
        ),
        (
            1,
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 9, "lr_wsd_decay_samples": 2},
            "--lr-wsd-decay-iters 9 and --lr-wsd-decay-samples 2",
            "one of the two",
        ),
        (
            1,
            {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1},
            "--weight-decay-incr-style linear without --end-weight-decay",
            "--end-weight-decay X",
        ),
        (
            1,
            {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1, "end_weight_decay": 0.01},
            "--start-weight-decay 0.1 --end-weight-decay 0.01",
            "--start-weight-decay 0.01, --end-weight-decay 0.1",
        ),
        (
            1,
            {"lr_decay_samples": 100, "lr_decay_tokens": 1600, "lr_decay_iters": 10},
            "--lr-decay-iters 10 and --lr-decay-samples 100 and --lr-decay-tokens 1600",
            "one of them",
        ),
        (
            1,
            {"lr_warmup_samples": 20, "lr_decay_tokens": 300},
            "--lr-warmup-samples 20 --lr-decay-tokens 300: a warm-up of 20 samples in a decay of 18.75, at --seq-length"
            " 16",
            "--lr-warmup-samples 18, --lr-decay-samples 21",
        ),
        (1, {"min_lr": 0.1}, "--lr 0.001 --min-lr 0.1", "--min-lr 0.001, --lr 0.1"),
        (
            1,
            {"lr_warmup_iters": 2, "lr_warmup_fraction": 0.1},
            "--lr-warmup-iters 2 and --lr-warmup-fraction 0.1",
            "one of the two",
        ),
        (1, {"lr_warmup_iters": 10}, "--lr-warmup-iters 10", "--lr-warmup-iters 9, --lr-decay-iters 11"),
        (
            1,
            {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True, "load": "x"},
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler",
            "one of the two",
        ),
        (
            1,
            {"initial_loss_scale": 0.5},
            "--initial-loss-scale 0.5 --min-loss-scale 1",
            "--initial-loss-scale 1, --min-loss-scale 0.5",
        ),
        (
            1,
            {"prescale_gradients": True, "gradient_predivide_factor": 2},
            "--prescale-gradients and --gradient-predivide-factor 2",
            "--gradient-predivide-factor 1, or leave out --prescale-gradients",
        ),
        (
            1,
            {"optimizer": "lamb", "offload_optimizer": "cpu", "delayed_parameter_update": True},
            "--delayed-parameter-update with --optimizer lamb",
            "leave out --delayed-parameter-update, or another optimizer",
        ),
    ],
)
def test_a_broken_rule(world_size: int, settings: dict[str, Any], given: str, legal: str) -> None:
    found = only(world_size, **settings)
    assert found.given.startswith(given)
    assert found.rule and found.legal.startswith(legal)


@given(
    hidden=st.integers(1, 300),
    heads=st.integers(1, 40),
    degree=st.integers(1, 8),
    stages=st.integers(1, 4),
    world_size=st.integers(1, 12),
    batch=st.integers(1, 60),
)
def test_what_a_rule_calls_legal_mends_it(
    hidden: int, heads: int, degree: int, stages: int, world_size: int, batch: int
) -> None:
    settings = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "tensor_model_parallel_size": degree,
        "pipeline_model_parallel_size": stages,
        "global_batch_size": batch,
    }
    for problem in check(make_run(**settings), world_size):
        for remedy in problem.legal.split(", "):
            if remedy.endswith((" process", " processes")):
                again = check(make_run(**settings), int(remedy.split()[0]))
            else:
                flag, value = remedy.split()
                changed = {**settings, flag.removeprefix("--").replace("-", "_"): int(value)}
                again = check(make_run(**changed), world_size)
            assert problem.rule not in [other.rule for other in again], remedy


def test_a_suggested_degree_fits_the_heads_and_the_job() -> None:
    layout = {"num_attention_heads": 8, "pipeline_model_parallel_size": 2}
    assert only(6, **layout, tensor_model_parallel_size=3, ffn_hidden_size=96).legal == "--tensor-model-parallel-size 1"
    assert only(12, **layout, tensor_model_parallel_size=3, ffn_hidden_size=96).legal == (
        "--tensor-model-parallel-size 2"
    )
    unfit = check(make_run(**layout, tensor_model_parallel_size=3, ffn_hidden_size=96), 5)
    assert [problem.legal for problem in unfit] == [  # the pipeline size is wrong by itself
        "--tensor-model-parallel-size 2, --tensor-model-parallel-size 4",
        "6 processes",
    ]


def test_a_layout_is_mended_without_knowing_heads_and_layers() -> None:
    settings = {**SMALL, "tensor_model_parallel_size": 4, "num_attention_heads": "x", "num_layers": "y"}
    outcome = validate({name: RawValue(name, value, name) for name, value in settings.items()})
    (problem,) = check(outcome.partial, 6)
    assert problem.legal == "4 processes, 8 processes, --tensor-model-parallel-size 3, --tensor-model-parallel-size 6"


def test_one_is_no_plural() -> None:
    (problem,) = check(make_run(pipeline_model_parallel_size=2), 1)
    assert problem.given.startswith("1 process with ")
    assert only(1, global_batch_size=3).given.endswith("on 1 data-parallel process")


def test_a_suggested_batch_fills_the_turns() -> None:
    chunks = {"num_layers": 4, "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}
    assert only(2, **chunks, global_batch_size=21).legal == "--global-batch-size 20, --global-batch-size 24"


def test_all_problems_come_together() -> None:
    found = check(make_run(num_attention_heads=7, tensor_model_parallel_size=2, train_iters=None, min_lr=1), 3)
    assert len(found) == 5


def test_advice_is_given_on_narrow_sums_only() -> None:
    narrow = {"precision": "bf16", "global_batch_size": 8}
    assert len(advice(make_run(**narrow), 1)) == 1
    assert "4 micro-batches" in advice(make_run(**narrow), 1)[0]
    assert advice(make_run(**narrow), 4) == ()
    assert advice(make_run(**narrow, accumulate_allreduce_grads_in_fp32=True), 1) == ()
    assert advice(make_run(precision="fp32", global_batch_size=8), 1) == ()
    assert advice(make_run(**narrow, min_lr=1), 1) == ()


def test_rules_that_need_an_unknown_setting_are_passed_over() -> None:
    settings = {**SMALL, "num_attention_heads": "seven", "min_lr": 1}
    outcome = validate({name: RawValue(name, value, name) for name, value in settings.items()})
    assert [item.given for item in check(outcome.partial, 1)] == ["--lr 0.001 --min-lr 1"]


def test_a_launch_script_passes() -> None:
    """The flags of a published GPT-2 script break no rule on one machine of eight GPUs."""
    script = """
    --tensor-model-parallel-size 2 --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 4
    --global-batch-size 64 --seq-length 1024 --max-position-embeddings 1024 --train-iters 500000 --lr-decay-iters 320000
    --save checkpoints --load checkpoints --data-path corpus_text_document --data-impl mmap --split 949,50,1
    --distributed-backend nccl --lr 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine --weight-decay 1e-2 --clip-grad 1.0
    --lr-warmup-fraction .01 --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --fp16
    """
    assert check(parse(script.split()).config, 8) == ()


def test_every_rule_says_its_name_once() -> None:
    assert len({rule.__name__ for rule in RULES}) == len(RULES)
