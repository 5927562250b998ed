"""Tests of the whole command line: precedence of sources, foreign flags, and all problems reported at once."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.configs import make_run
from support.each import each

from megazero.command_line.parse import ParsedRun, from_yaml, parse
from megazero.config.engine_sections import ActivationConfig
from megazero.config.run import RunConfig
from megazero.config.yaml_file import to_yaml
from megazero.errors import ConfigError, Problem

BASE = "--preset gpt2-124m --micro-batch-size 4 --lr 1e-4 --train-iters 100 --data-path corpus"


def run(line: str) -> ParsedRun:
    return parse(f"{BASE} {line}".split())


def problems(line: str, *, world_size: int | None = None) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(line.split(), world_size=world_size)
    return caught.value.problems


def only_problem(line: str) -> Problem:
    found = problems(f"{BASE} {line}")
    assert len(found) == 1, found
    return found[0]


# --- values and precedence -------------------------------------------------------------------------------------------


def test_flags_set_settings() -> None:
    config = run("--zero-stage 2 --tensor-model-parallel-size 2 --split 90,10 --no-save-optim --save runs/a").config
    assert (config.zero.zero_stage, config.parallel.tensor_model_parallel_size) == (2, 2)
    assert (config.data.split, config.data.data_path) == ("90,10", ("corpus",))
    assert config.checkpoint.no_save_optim and config.checkpoint.save == Path("runs/a")
    assert (config.model.num_layers, config.model.vocab_size) == (12, 50257)


def test_a_flag_wins_over_the_file_and_the_file_over_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("num_layers: 3\nhidden_size: 60\nnum_attention_heads: 12\nlr: 1e-3\nfp16: true\nbatch_size: 8\n")
    config = parse(f"--config {file} --preset gpt2-124m --num-layers 5 --train-iters 1 --data-path x".split()).config
    assert (config.model.num_layers, config.model.hidden_size, config.model.seq_length) == (5, 60, 1024)
    assert (config.optimizer.lr, config.precision.precision, config.training.micro_batch_size) == (1e-3, "fp16", 8)


def test_the_last_of_equal_flags_wins_with_a_notice() -> None:
    parsed = run("--seed 1 --seed 2 --split 9,1 --split 9,1")
    assert parsed.config.training.seed == 2
    assert parsed.notices == ("--seed 2: given last, so it counts in place of --seed 1",)


@each(
    ("flags", "expected"),
    [("", True), ("--overlap-comm", True), ("--no-overlap-comm", False), ("--overlap-comm false", False)],
)
def test_a_switch_that_is_on_can_be_turned_off(flags: str, expected: bool) -> None:
    assert run(flags).config.zero.overlap_comm is expected


def test_a_switch_of_the_file_can_be_turned_off(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("mock_data: true\nno_overlap_comm: true\n")
    assert run(f"--config {file}").config.data.mock_data is True
    assert run(f"--config {file}").config.zero.overlap_comm is False
    assert run(f"--config {file} --mock-data false").config.data.mock_data is False


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", False),
        ("--partition-activations", True),
        ("--partition-activations true", True),
        ("--partition_activations=false", False),
        ("--partition-activations auto", "auto"),
        ("--distribute-saved-activations", True),
        ("--distribute-saved-activations --partition-activations true", True),
    ],
)
def test_a_switch_may_be_left_to_megazero(flags: str, expected: bool | str, tmp_path: Path) -> None:
    full = "--recompute-granularity full --tensor-model-parallel-size 2"
    assert run(f"{full} {flags}").config.activations.partition_activations == expected
    file = tmp_path / "run.yaml"
    file.write_text(f"partition-activations: {str(expected).lower()}\n")
    assert run(f"{full} --config {file}").config.activations.partition_activations == expected


def test_a_zero_configuration_stands_between_preset_and_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("zero_stage: 3\npartition_activations: auto\n")
    line = f"--config {file} --zero-config C5 --checkpoint-in-cpu false --recompute-num-layers 2"
    config = run(line).config
    assert (config.zero.zero_stage, config.model.num_layers) == (3, 12)
    assert (config.activations.partition_activations, config.activations.checkpoint_in_cpu) == ("auto", False)
    assert (config.activations.recompute_granularity, config.activations.recompute_num_layers) == ("full", 2)
    assert config.activations.contiguous_checkpointing and config.zero.contiguous_gradients


def test_a_later_zero_configuration_replaces_an_earlier_one() -> None:
    assert run("--zero-config C5 --zero-config C1").config == run("--zero-config C1").config
    assert run("--zero-config C5").config.activations.checkpoint_in_cpu is True


def test_a_zero_configuration_covers_the_distributed_optimizer() -> None:
    parsed = run("--zero-config C3 --use-distributed-optimizer")
    assert parsed.config.zero.zero_stage == 2
    assert parsed.notices == ("--use-distributed-optimizer: covered by --zero-config C3: zero_stage 2",)


# --- foreign flags ---------------------------------------------------------------------------------------------------


@each("name", ["fp64", "fp32", "bf16", "fp16"])
def test_precision_shorthands(name: str) -> None:
    assert run(f"--{name}").config.precision.precision == name
    assert run(f"--{name} --precision {name}").config.precision.precision == name


@each(
    ("flags", "stage"),
    [("", 1), ("--zero-stage 2", 2), ("--zero-stage 1", 1), ("--zero-stage=2", 2), ("--zero-stage 3", 3)],
)
def test_the_distributed_optimizer_is_at_least_stage_1(flags: str, stage: int) -> None:
    parsed = run(f"--use-distributed-optimizer {flags}")
    assert parsed.config.zero.zero_stage == stage
    assert len(parsed.notices) == 1 and "--use-distributed-optimizer" in parsed.notices[0]


def test_the_distributed_optimizer_clashes_with_stage_0() -> None:
    assert only_problem("--zero-stage 0 --use-distributed-optimizer").given == (
        "--zero-stage 0 and --use-distributed-optimizer"
    )


def test_stage3_names_are_aliases() -> None:
    zero = run("--zero-stage 3 --stage3_max_live_parameters 7 --stage3-prefetch-bucket-size 8").config.zero
    assert (zero.zero_stage, zero.max_live_parameters, zero.prefetch_bucket_size) == (3, 7, 8)


@each(
    ("flags", "granularity"),
    [
        ("", "none"),
        ("--recompute-activations", "selective"),
        ("--checkpoint-activations", "full"),
        ("--checkpoint-activations --recompute-granularity full", "full"),
        ("--recompute-activations --recompute-granularity selective", "selective"),
    ],
)
def test_shorthands_of_recomputation(flags: str, granularity: str) -> None:
    assert run(flags).config.activations.recompute_granularity == granularity


def test_a_megatron_deepspeed_scripts_flags_of_recomputation() -> None:
    parsed = run(
        "--checkpoint-activations --deepspeed-activation-checkpointing --checkpoint-num-layers 2 --profile-backward"
        " --partition-activations --checkpoint-in-cpu --synchronize-each-layer --contigious-checkpointing"
        " --tensor-model-parallel-size 2"
    )
    assert parsed.config.activations == ActivationConfig(
        recompute_granularity="full",
        recompute_num_layers=2,
        partition_activations=True,
        checkpoint_in_cpu=True,
        contiguous_checkpointing=True,
        synchronize_each_layer=True,
        profile_backward=True,
    )
    assert [notice.split(":")[0] for notice in parsed.notices] == ["--deepspeed-activation-checkpointing"]


def test_the_modules_of_selective_recomputation_are_fixed(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("recompute_activations: true\nrecompute_modules: [core_attn]\n")
    for flags in (f"--config {file}", "--recompute-granularity selective --recompute-modules core_attn"):
        parsed = run(flags)
        assert parsed.config.activations.recompute_granularity == "selective"
        assert [notice.split(":")[0] for notice in parsed.notices] == ["--recompute-modules core_attn"]


def test_two_spellings_of_one_value_agree() -> None:
    assert run("--lr-warmup-fraction 0.01 --warmup 1e-2").config.optimizer.lr_warmup_fraction == 0.01
    assert run("--micro-batch-size 4 --batch-size 4.0").config.training.micro_batch_size == 4


def test_shorthands_and_fixed_flags_have_the_same_truth_values_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("fp16: 1\ncpu_offload_optimizer: false\n")
    for flags in (f"--config {file}", "--fp16 on --cpu-offload-optimizer false", "--fp16=true"):
        assert run(flags).config.precision.precision == "fp16"
    file.write_text("fp16: 'off'\n")
    for flags in (f"--config {file}", "--fp16 0", "--fp16 False"):
        assert run(flags).config.precision.precision == "fp32"


def test_a_stronger_source_replaces_an_illegal_value(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: many\nzero_stage: 7\n")
    assert only_problem(f"--config {file} --seed 5").given == f"{file}: zero_stage: 7"
    assert only_problem(f"--config {file} --zero-stage 2 --seed few").given == "--seed few"


def test_kernel_flags_and_fixed_values_earn_a_notice() -> None:
    flags = "--no-masked-softmax-fusion --transformer-impl local --data-impl mmap --no-load-rng --deepspeed"
    notices = run(f"{flags} --round_robin_gradients").notices
    assert [notice.split(":")[0] for notice in notices] == [
        "--no-masked-softmax-fusion",
        "--transformer-impl",
        "--data-impl mmap",
        "--no-load-rng",
        "--deepspeed",
        "--round-robin-gradients",
    ]
    assert all("\n" not in notice for notice in notices)


@each(
    ("flags", "given", "rule"),
    [
        ("--mup", "--mup", "and no more"),
        ("--decoder-first-pipeline-num-layers 3", "--decoder-first-pipeline-num-layers 3", "as --pipeline-split sets"),
        (
            "--num-virtual-stages-per-pipeline-rank 2",
            "--num-virtual-stages-per-pipeline-rank 2",
            "give --num-layers-per-virtual-pipeline-stage",
        ),
        (
            "--pipeline-model-parallel-size 2 --no-pipeline-parallel",
            "--pipeline-model-parallel-size 2 and --no-pipeline-parallel",
            "both set --pipeline-model-parallel-size",
        ),
        (
            "--rank-order pp-dp-tp --use-tp-pp-dp-mapping",
            "--rank-order pp-dp-tp and --use-tp-pp-dp-mapping",
            "both set --rank-order",
        ),
        ("--deepspeed_config /none.json", "/none.json", "can't be read"),
        (
            "--deepspeed-config a.json --deepspeed_config b.json",
            "--deepspeed-config a.json --deepspeed-config b.json",
            "one",
        ),
        ("--use-checkpoint-args", "--use-checkpoint-args", "settings are given anew"),
        ("--prescale-gradients 3", "--prescale-gradients 3", "true or false"),
        (
            "--zero-stage 3 --prefetch-bucket-size 5 --stage3-prefetch-bucket-size 6",
            "--prefetch-bucket-size 5 and --stage3-prefetch-bucket-size 6",
            "different values",
        ),
        ("--recompute-granularity half", "--recompute-granularity half", "one of none, selective, full"),
        ("--recompute-modules core_attn mlp", "--recompute-modules core_attn mlp", "that of the attention core"),
        ("--cpu-offloading-num-layers 3", "--cpu-offloading-num-layers 3", "--checkpoint-in-cpu"),
        (
            "--recompute-activations --checkpoint-activations",
            "--recompute-activations and --checkpoint-activations",
            "different values",
        ),
        (
            "--recompute-granularity full --recompute-activations",
            "--recompute-granularity full and --recompute-activations",
            "different values",
        ),
        ("--partition-activations perhaps", "--partition-activations perhaps", "one of true, false, auto"),
        (
            "--partition-activations --distribute-saved-activations auto --checkpoint-activations",
            "--partition-activations and --distribute-saved-activations auto",
            "different values",
        ),
        ("--zero-config c4", "--zero-config c4", "no zero-config"),
        ("--normalization apex", "--normalization apex", "LayerNorm, RMSNorm"),
        ("--fp16 --bf16", "--fp16 and --bf16", "different values"),
        ("--precision fp32 --fp16", "--precision fp32 and --fp16", "different values"),
        ("--batch-size 2", "--micro-batch-size 4 and --batch-size 2", "different values"),
        ("--overlap-grad-reduce --no-overlap-comm", "--no-overlap-comm and --overlap-grad-reduce", "different values"),
        ("--num-layer 3", "--num-layer", "no setting of this name"),
        ("--zero_stag=2", "--zero-stag=2", "no setting of this name"),
        ("--lr", "--lr", "needs a value"),
        ("--data-path", "--data-path", "needs a value"),
        ("--seed 1 2", "--seed 1 2", "one value, not 2"),
        ("--preset gpt2-124M", "--preset gpt2-124M", "no preset"),
        ("--config /nonexistent.yaml", "--config /nonexistent.yaml", "can't be read"),
        ("--fp16 perhaps", "--fp16 perhaps", "true or false"),
    ],
)
def test_refusals(flags: str, given: str, rule: str) -> None:
    found = only_problem(flags)
    assert found.given == given and rule in found.rule and found.legal


def test_a_misspelt_flag_gets_its_neighbours() -> None:
    assert "--num-layers" in only_problem("--num-layer 3").legal
    assert "--tensor-model-parallel-size" in only_problem("--tensor-parallel-size 3").legal


def test_what_a_misspelt_flag_would_have_set_is_not_missing_too() -> None:
    line = (
        "--num-layers 2 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --lr 1e-3 --mock-data"
        " --vocab-size 8"
    )
    found = problems(f"{line} --hiden-size 4 --max-steps 3", world_size=1)
    assert [item.given for item in found] == ["--hiden-size", "--max-steps"]
    assert [item.given for item in problems(line, world_size=1)] == [
        "--hidden-size is missing",
        "neither --train-iters nor --train-samples",
    ]


def test_a_word_that_follows_no_flag_is_refused() -> None:
    assert [item.given for item in problems(f"stray {BASE}")] == ["stray"]


@each("flag", ["--config", "--preset", "--zero-config", "--deepspeed-config"])
def test_a_source_without_a_name_is_refused(flag: str) -> None:
    assert only_problem(flag).rule == f"{flag} needs a value"


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 1e-3\nhidden_size: wide\nmup: true\n")
    line = (
        f"--config {file} --foo 1 --num-layers 0 --num-attention-heads 7 --tensor-model-parallel-size 2"
        " --seq-length 16 --micro-batch-size 2 --lr 1e-3 --min-lr 1 --train-iters 5 --mock-data --fp16 --bf16"
    )
    given = [item.given for item in problems(line, world_size=3)]
    assert given == [
        "--foo",
        f"{file}: learning_rate: 1e-3",
        f"{file}: mup: true",
        "--fp16 and --bf16",
        "--num-layers 0",
        f"{file}: hidden_size: wide",
        "--tensor-model-parallel-size 2 --num-attention-heads 7",
        "3 processes with --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1",
        "--lr 0.001 --min-lr 1",
        "--mock-data without --vocab-size",
    ]


@pytest.mark.parametrize("name", ["config", "preset", "zero_config", "deepspeed_config"])
def test_a_source_is_named_on_the_command_line_only(tmp_path: Path, name: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{name}: x\n")
    assert "on the command line only" in only_problem(f"--config {file}").rule


def test_rules_between_settings_are_left_to_the_caller_when_all_settings_are_valid() -> None:
    assert parse(f"{BASE} --num-attention-heads 7".split(), world_size=3).config.model.num_attention_heads == 7


def test_advice_is_a_notice_when_the_world_is_known() -> None:
    line = f"{BASE} --bf16 --global-batch-size 8".split()
    assert parse(line).notices == ()
    assert [notice.split(":")[0] for notice in parse(line, world_size=1).notices] == ["--bf16"]


@each("question", ["--help", "--check", "--print-config", "--version"])
def test_a_question_is_no_setting(question: str) -> None:
    """Programs that take the flags of a run, such as verify-layout, refuse what only a run's own program answers."""
    problem = only_problem(question)
    assert problem.given == question and problem.legal == f"leave out {question}"


# --- the resolved configuration --------------------------------------------------------------------------------------

RUNS = st.builds(
    make_run,
    lr=st.floats(1e-12, 1e3),
    init_method_std=st.floats(1e-300, 1e300),
    data_path=st.lists(st.text("ab: #-'\"é/", min_size=1), max_size=4),
    split=st.sampled_from(["969,30,1", "100", "0.1,0.2", "1/1", "no", "1e3", "1_0"]),
    save=st.none() | st.sampled_from(["runs/a", "true", "1", "null", "~", "a: b"]),
    global_batch_size=st.none() | st.integers(1, 10**12),
    precision=st.sampled_from(["fp64", "fp32", "bf16", "fp16"]),
    overlap_comm=st.booleans(),
    partition_activations=st.sampled_from([True, False, "auto"]),
    number_checkpoints=st.none() | st.integers(1, 100),
)


@settings(max_examples=50, deadline=None)
@given(RUNS)
def test_what_is_written_reads_back_equal(config: RunConfig) -> None:
    assert from_yaml(to_yaml(config)) == config


def test_a_saved_configuration_is_a_config_file(tmp_path: Path) -> None:
    first = run("--fp16 --split 90,10").config
    (tmp_path / "run.yaml").write_text(to_yaml(first))
    assert parse(["--config", str(tmp_path / "run.yaml")]).config == first


def test_a_damaged_saved_configuration_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        from_yaml(to_yaml(make_run()) + "surplus: 1\n", origin="run.yaml")
    assert [item.given for item in caught.value.problems] == ["run.yaml: surplus: 1"]
