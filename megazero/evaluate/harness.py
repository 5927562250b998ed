"""A model of lm-evaluation-harness (the package `lm_eval`, from `pip install megazero[lm-eval]`) from a checkpoint.

    import lm_eval
    from megazero.evaluate.harness import MegazeroLM

    with MegazeroLM(load="runs/demo") as model:
        print(lm_eval.simple_evaluate(model=model, tasks=["lambada_openai"])["results"])

Started on several processes (torchrun), each of them is given all requests, they share the work, and the harness
returns the results on the first process of every node.  Importing this module registers the model as "megazero".
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import lm_eval.models  # noqa: F401  (the harness registers its own models by itself only while there is no other)
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from megazero.console import Console
from megazero.errors import ConfigError, Problem
from megazero.evaluate.model import open_model
from megazero.evaluate.windows import continuation, whole
from megazero.generate.sampling import Sampling
from megazero.generate.texts import StopTexts
from megazero.parallel.launch import Launch
from megazero.prepare.arguments import TOKENIZER_FLAGS, with_tokenizer_flags

_NEW_TOKENS = 256  # where a task sets no length
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p")
_TOKENIZER = (*TOKENIZER_FLAGS, "tiktoken_pattern", "tiktoken_num_special_tokens")


class MegazeroLM(LM):
    """A checkpoint's model on this process, or its share of it.

    load: a run's checkpoints, or one of them; step: of the run, the newest if None.  batch_size: texts read at a time.
    Further keywords are the tokenizer's, where the run's configuration names none: tokenizer_type="...",
    tokenizer_model="...".  Raises UserError.
    """

    def __init__(
        self,
        load: str | Path,
        *,
        step: int | None = None,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        batch_size: int | str = 8,
        device: str = "auto",
        **tokenizer: Any,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ConfigError(Problem(f"batch_size {batch_size}", "a batch is a number of texts", "batch_size=8"))
        flags = Namespace(**(dict.fromkeys(_TOKENIZER) | tokenizer))
        if unknown := sorted(set(tokenizer) - set(_TOKENIZER)):
            rule = "further arguments are those of a tokenizer"
            raise ConfigError(Problem(", ".join(unknown), rule, ", ".join(_TOKENIZER)))
        launch = Launch.from_environment()
        self._opened = open_model(
            Path(load),
            launch,
            step=step,
            tp=tensor_model_parallel_size,
            pp=pipeline_model_parallel_size,
            device=device,
            with_flags=lambda data: with_tokenizer_flags(data, flags),
        )
        self._tokenizer = self._opened.tokenizer
        self._job = ExitStack()
        self._rows = int(batch_size)
        self._scorer = self._job.enter_context(self._opened.loaded(rows=self._rows, console=Console(launch.rank)))

    def close(self) -> None:
        """Leave the job of several processes."""
        self._job.close()

    def __enter__(self) -> "MegazeroLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._job.__exit__(kind, error, trace)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return for each (context, continuation) its log-likelihood, and whether greedy choice would write it."""
        asked = [continuation(self._tokenizer, *request.args) for request in requests]
        scores = self._scorer.score(asked, name="loglikelihood")
        return [(score.log_likelihood, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Return the log-likelihood of every text, whose first token comes behind an end of a document."""
        asked = [whole(self._tokenizer, text) for (text,) in (request.args for request in requests)]
        return [score.log_likelihood for score in self._scorer.score(asked, name="loglikelihood_rolling")]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return what follows every context, up to a text of `until`, the end of a document or the length that is set.

        All processes generate the same texts.
        """
        texts = [""] * len(requests)
        settings = [_generation(request.args[1]) for request in requests]
        for each in dict.fromkeys(settings):
            numbers = [number for number, own in enumerate(settings) if own == each]
            found = self._continue([requests[number].args[0] for number in numbers], each)
            for number, text in zip(numbers, found, strict=True):
                texts[number] = text
        return texts

    def _continue(self, contexts: Sequence[str], settings: "_Generation") -> list[str]:
        tokenizer, most = self._tokenizer, self._opened.length - settings.length
        if most < 1:
            given, legal = f"max_gen_toks {settings.length}", f"max_gen_toks 1 to {self._opened.length - 1}"
            raise ConfigError(Problem(given, f"a context and what follows fit {self._opened.length} tokens", legal))
        prompts = [tokenizer.encode(context)[-most:] or [tokenizer.eod] for context in contexts]
        stops = StopTexts(tokenizer, settings.until)
        continuations = self._scorer.session.generate(
            prompts,
            sampling=settings.sampling,
            max_new_tokens=settings.length,
            eod=tokenizer.eod,
            ends=stops.are_in if settings.until else None,
            batch_size=self._rows,
        )
        return [stops.cut(prompt, one.tokens) for prompt, (one,) in zip(prompts, continuations, strict=True)]


class _Generation(NamedTuple):
    """A task's way of generating: the choice of tokens, the most new ones, and the texts that end it."""

    sampling: Sampling
    length: int
    until: tuple[str, ...]


def _generation(settings: Mapping[str, Any]) -> _Generation:
    unknown = sorted(set(settings) - {*_LENGTHS, *_SAMPLING, "until"})
    if unknown:
        legal = ", ".join(("until", _LENGTHS[0], *_SAMPLING))
        raise ConfigError(Problem(", ".join(unknown), "a task's settings of generation are served or refused", legal))
    lengths = [settings[name] for name in _LENGTHS if settings.get(name) is not None]
    words = settings.get("until") or []
    temperature = settings.get("temperature")
    sampling = Sampling(
        1.0 if temperature is None else float(temperature),
        int(settings.get("top_k") or 0),
        float(settings.get("top_p") or 1.0),
        greedy=not settings.get("do_sample", bool(temperature)),
    )
    until = (words,) if isinstance(words, str) else tuple(words)
    return _Generation(sampling, int(lengths[0]) if lengths else _NEW_TOKENS, until)


register_model("megazero")(MegazeroLM)
