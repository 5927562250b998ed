"""Tests the model of lm-evaluation-harness on tasks of files: figures are those of the harness' own transformers model.

`megazero evaluate` has the same figures on the same files.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import run_config, save_checkpoint
from support.hugging_face_files import write_hugging_face_files
from support.models import small_config

from megazero.commands.convert import main as convert
from megazero.commands.evaluate import main as evaluate
from megazero.config.run import DataConfig
from megazero.errors import ConfigError, DataError
from megazero.evaluate.wikitext import natural_text

os.environ.setdefault("HF_HUB_OFFLINE", "1")
lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install megazero[lm-eval]")
pytest.importorskip("accelerate", reason="the harness' own model needs accelerate")

TEXTS = ["the thing number 7 is in the bag of words,\n naïve café " * 6, "", "x", " = the bag @-@ thing = \n"]
PASSAGES = ["the thing number 3 is in the bag of words", "words", "the  bag of naïve café", "a b c " * 20 + "thing"]
QUESTIONS = [
    {"context": "the thing number", "choices": ["3", "is in the bag", "naïve café"], "label": 1},
    {"context": "", "choices": ["words", "the bag"], "label": 0},
    {"context": "the bag of ", "choices": ["thing", "café " * 12 + "words"], "label": 1},
]
LINES = {
    "perplexity": [{"text": text} for text in TEXTS],
    "lambada": [{"text": text} for text in PASSAGES],
    "choices": QUESTIONS,
    "answers": [{"question": text, "answer": "bag"} for text in ("the thing", "the bag of", "café " * 9)],
}
# The harness' tasks of these files; a task's metrics are those that `megazero evaluate` has too.
TASKS = {
    "perplexity": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "lambada": """
output_type: loglikelihood
doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
doc_to_target: "{{' ' + text.split(' ')[-1]}}"
metric_list: [{metric: perplexity, aggregation: perplexity}, {metric: acc, aggregation: mean}]
""",
    "choices": """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["e"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run, the same model for transformers, the files of data, and the harness' tasks."""
    folder = tmp_path_factory.mktemp("harness")
    (folder / "tokenizer").mkdir()
    write_hugging_face_files(folder / "tokenizer", "byte-level")
    described = folder / "tokenizer" / "tokenizer.json"
    # Without a template, by which transformers would put a sign in front of every text.
    described.write_text(json.dumps({**json.loads(described.read_text()), "post_processor": None}))
    data = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder / "tokenizer")
    config = run_config(small_config(init_method_std=0.3, seq_length=24), data=data)
    save_checkpoint(folder / "run", config, vocab_size=400, tp=1)
    convert(["export", "--load", str(folder / "run"), "--output", str(folder / "hf")])
    for name, lines in LINES.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        head = f"task: own_{name}\ndataset_path: json\ntest_split: test\ndataset_kwargs: {{data_files: {{test: "
        (folder / f"{name}.yaml").write_text(f"{head}{folder / f'{name}.jsonl'}}}}}{TASKS[name]}")
    return folder


def run_harness(model: Any, place: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[Any, Any]:
    """Return the harness' figures by task, without its names of filters, and the texts that were generated."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(place / "cache"))
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=[f"own_{name}" for name in TASKS],
        task_manager=TaskManager(include_path=str(place), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
        **settings,
    )
    figures = {
        name: {key.removesuffix(",none"): value for key, value in found["results"][f"own_{name}"].items()}
        for name in TASKS
    }
    return figures, [sample["resps"] for sample in found["samples"]["own_answers"]]


def test_figures_are_those_of_the_harness_with_transformers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megazero.evaluate.harness import MegazeroLM

    given = {"model_args": f"pretrained={place / 'hf'},dtype=float64", "device": "cpu", "batch_size": 2}
    theirs, their_texts = run_harness("hf", place, monkeypatch, **given)
    with MegazeroLM(load=place / "run", batch_size=3, device="cpu") as model:
        ours, our_texts = run_harness(model, place, monkeypatch)
    assert our_texts == their_texts and len(our_texts) == 3
    words = [f"--{name} {place / name}.jsonl" for name in ("perplexity", "lambada", "choices")]
    output = place / "figures.json"
    evaluate(f"--load {place / 'run'} --device cpu --output {output} {' '.join(words)}".split())
    program = {each["task"]: each["figures"] for each in json.loads(output.read_text())["results"]}
    metrics = {
        "perplexity": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
        "lambada": ("perplexity", "acc"),
        "choices": ("acc", "acc_norm", "acc_bytes"),
    }
    for task, names in metrics.items():
        for name in names:
            assert ours[task][name] == pytest.approx(theirs[task][name], rel=1e-9), (task, name)
            assert program[task][name] == pytest.approx(theirs[task][name], rel=1e-9), (task, name)
    assert 0 < theirs["choices"]["acc"] < 1


def test_the_model_is_registered_and_takes_a_command_lines_arguments(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.api.registry import get_model

    from megazero.evaluate.harness import MegazeroLM

    assert get_model("megazero") is MegazeroLM
    settings = {"model_args": f"load={place / 'run'},step=7", "device": "cpu", "batch_size": "2"}
    figures, _ = run_harness("megazero", place, monkeypatch, **settings)
    assert figures["lambada"]["perplexity"] > 1


def test_wrong_arguments_are_refused(place: Path) -> None:
    from lm_eval.api.instance import Instance

    from megazero.evaluate.harness import MegazeroLM

    for arguments, message in (
        ({"batch_size": "auto"}, "batch_size auto"),
        ({"dtype": "float16"}, "dtype\n    rule:  further arguments are those of a tokenizer"),
    ):
        with pytest.raises(ConfigError, match=message):
            MegazeroLM(load=place / "run", **arguments)
    with pytest.raises(DataError, match="--tokenizer-model gone"):
        MegazeroLM(load=place / "run", tokenizer_type="SentencePieceTokenizer", tokenizer_model="gone")
    with MegazeroLM(load=place / "run", device="cpu") as model:
        for settings, message in (({"num_beams": 4}, "num_beams"), ({"max_gen_toks": 24}, "max_gen_toks 1 to 23")):
            request = Instance("generate_until", {}, ("the", settings), 0)
            with pytest.raises(ConfigError, match=message):
                model.generate_until([request])


def test_natural_text_is_the_harness_own() -> None:
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    texts = [
        ' = Valkyria Chronicles III = \n \n Senjō no Valkyria 3 : Unrecorded Chronicles ( Japanese : lit . ) is " a',
        "n RPG \" ; in 1 @,@ 500 @-@ odd 1 @.@ 5 ' s ' games [ sic ] { x } = = a = = = b = = = = c",
        "5 ° N 's , ! ? ' quoted text ' s ' of N it \n \n",
    ]
    for text in (*texts, "".join(texts)):
        assert natural_text(text) == wikitext_detokenizer({"page": text})
