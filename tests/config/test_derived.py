"""Tests of figures that are derived from settings, such as the padded vocabulary and the number of micro-batches."""

from support.configs import make_run
from support.each import each

from megazero.config import derived


@each(
    ("vocab", "divisible_by", "degree", "padded"),
    [(50257, 128, 1, 50304), (50257, 128, 8, 51200), (128, 128, 1, 128), (257, 1, 3, 258), (1, 128, 2, 256)],
)
def test_padded_vocabulary(vocab: int, divisible_by: int, degree: int, padded: int) -> None:
    assert derived.padded_vocab_size(vocab, divisible_by=divisible_by, tensor_parallel_size=degree) == padded


def test_model_sizes_follow_from_others_or_are_given() -> None:
    plain, given = make_run().model, make_run(ffn_hidden_size=100, max_position_embeddings=64).model
    assert (derived.ffn_hidden_size(plain), derived.max_position_embeddings(plain)) == (128, 16)
    assert (derived.ffn_hidden_size(given), derived.max_position_embeddings(given)) == (100, 64)


def test_batches_on_a_layout() -> None:
    run = make_run(tensor_model_parallel_size=2, micro_batch_size=3, global_batch_size=48)
    assert derived.model_parallel_size(run) == 2
    assert derived.data_parallel_size(run, 8) == 4
    assert derived.samples_per_micro_step(run, 8) == 12
    assert derived.num_micro_batches(run, 8) == 4
    assert derived.global_batch_size(make_run(micro_batch_size=3), 8) == 24


def test_pipelines() -> None:
    plain = make_run()
    assert (derived.num_virtual_chunks(plain), derived.pipeline_schedule(plain)) == (1, "1f1b")
    assert derived.given_split(plain) is None
    layout = {"num_layers": 24, "pipeline_model_parallel_size": 4}
    chunks = make_run(**layout, num_layers_per_virtual_pipeline_stage=2, pipeline_split="3, 2,1,0")
    assert (derived.num_virtual_chunks(chunks), derived.pipeline_schedule(chunks)) == (3, "interleaved")
    assert derived.given_split(chunks) == (3, 2, 1, 0)
    assert derived.pipeline_schedule(make_run(**layout, pipeline_schedule="zero-bubble")) == "zero-bubble"
    assert derived.data_parallel_size(chunks, 8) == 2


def test_length_in_steps() -> None:
    assert derived.train_iters(make_run(train_iters=7), 1) == 7
    assert derived.train_iters(make_run(train_iters=None, train_samples=25, global_batch_size=4), 2) == 6


def test_schedule_in_steps() -> None:
    assert derived.lr_decay_iters(make_run(train_iters=50), 1) == 50
    assert derived.lr_decay_iters(make_run(train_iters=50, lr_decay_iters=40), 1) == 40


def test_the_length_is_whatever_comes_first() -> None:
    """25 samples are 6 steps of 4; tokens are whole samples of 16; a ramp's smaller steps take more of them."""
    given = {"global_batch_size": 4, "train_iters": None}
    assert derived.train_iters(make_run(**given, train_tokens=25 * 16 + 15), 2) == 6
    assert derived.train_iters(make_run(**given, train_tokens=25 * 16, train_samples=13), 2) == 3
    assert derived.train_iters(make_run(global_batch_size=4, train_iters=5, train_tokens=25 * 16), 2) == 5
    ramp = make_run(**given, train_samples=25, rampup_batch_size=["2", "2", "6"])
    assert derived.train_iters(ramp, 2) == 7  # 2, 2, 2, 4, 4, 4, 4, and 3 are left
    assert derived.last_iteration(ramp, 2, iteration=9, consumed_samples=4) == 14
    assert derived.global_batch_size(ramp, 2) == 4 and derived.num_micro_batches(ramp, 1) == 2
    stepped = make_run(train_samples=25, train_iters=None, step_batch_size_schedule=["0:4 8K:2"])
    assert (derived.global_batch_size(stepped, 1), derived.num_micro_batches(stepped, 1)) == (2, 2)
    assert derived.lr_decay_iters(make_run(lr_decay_samples=9, global_batch_size=4), 1) == 3
