"""Evaluate a compiled model with and without its adapter: one load, two columns.

Input: a `LanguageModel`, items or questions, and a definition of scores. Output: a frozen `Evaluation` with the
definition, the versions of the libraries used, and every prediction. No network access.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ktc.foundation import versions
from ktc.inference.evaluate.comparison import RESAMPLES, Line, compare
from ktc.inference.evaluate.data import Item, Question
from ktc.inference.evaluate.likelihood import continuations, likelihoods
from ktc.inference.evaluate.metrics import Definition, Metric, mean_metric
from ktc.inference.evaluate.multiple_choice import DEFINITIONS, By, ask, choose
from ktc.inference.generate.answers import answer_all, set_seed
from ktc.inference.generate.language_model import LanguageModel, without_adapter
from ktc.inference.generate.prompts import Prompt, render, render_all, require_fit
from ktc.inference.generate.sampling import Sampling

Done = Callable[[int], None] | None
"""Receives the number of samples done."""
TOKEN_ACCURACY = (
    "token accuracy: the share of a reference's tokens that are the most probable after the tokens before them, a mean "
    "over samples; nothing is generated"
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`predictions` are rows for a JSONL file; `versions` names each library used."""

    task: str
    definition: str
    versions: dict[str, str]
    samples: int
    lines: tuple[Line, ...]
    predictions: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Return everything but the predictions."""
        return {
            "task": self.task,
            "definition": self.definition,
            "versions": self.versions,
            "samples": self.samples,
            "resamples": RESAMPLES,
            "metrics": [asdict(line) for line in self.lines],
        }


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Scores a model, and its adapter if it has one. `progress` receives the running column and the samples done."""

    opened: LanguageModel
    sampling: Sampling
    batch_size: int = 8
    progress: Callable[[str, int], None] | None = None

    def generation(
        self, items: Sequence[Item], definition: Definition, *, system: str = "", token_accuracy: bool = False
    ) -> Evaluation:
        """Score answers to the items against their references. Raises InputRefused (G702, G703, G706)."""
        opened, references = self.opened, [item.reference for item in items]
        prompts = render_all(
            items, lambda item: render(opened, item.prompt, system=system, raw=item.raw, place=item.place)
        )

        def run(progress: Done) -> tuple[list[str], tuple[Metric, ...]]:
            answers, _ = answer_all(opened, prompts, self.sampling, self.batch_size, progress)
            texts = [answer.text.strip() for answer in answers]
            more = [self._token_accuracy(prompts, references)] if token_accuracy else []
            return texts, (*definition.measure(texts, references), *more)

        lines, columns = self._compared(prompts, run)
        predictions = tuple(
            {"line": item.place.line, "prompt": prompt.text, "reference": item.reference, **made}
            for item, prompt, made in zip(items, prompts, columns, strict=True)
        )
        text = f"{definition.text} {TOKEN_ACCURACY}." if token_accuracy else definition.text
        return Evaluation("generation", text, _versions(definition.versions()), len(items), lines, predictions)

    def choices(self, questions: Sequence[Question], by: By, *, system: str = "", raw: bool = False) -> Evaluation:
        """Return the share of right letters. Raises InputRefused (G703, G706)."""
        opened = self.opened
        prompts = render_all(questions, lambda question: ask(opened, question, system=system, raw=raw))

        def run(progress: Done) -> tuple[list[dict[str, Any]], tuple[Metric, ...]]:
            chosen = choose(opened, questions, prompts, by, self.sampling, self.batch_size, progress)
            right = [100.0 * (c.letter == q.answer) for c, q in zip(chosen, questions, strict=True)]
            without = [100.0 * (not c.letter) for c in chosen]
            unanswered = [mean_metric("without a letter", without)] if by == "text" else []
            return [asdict(choice) for choice in chosen], (mean_metric("accuracy", right), *unanswered)

        lines, columns = self._compared(prompts, run)
        predictions = tuple(
            {"line": q.place.line, "question": q.text, "answer": q.answer, **made}
            for q, made in zip(questions, columns, strict=True)
        )
        return Evaluation("mcq", DEFINITIONS[by], _versions({}), len(questions), lines, predictions)

    def _compared(
        self, prompts: Sequence[Prompt], run: Callable[[Done], tuple[Sequence[Any], tuple[Metric, ...]]]
    ) -> tuple[tuple[Line, ...], list[dict[str, Any]]]:
        """Return the metrics of the base and, with an adapter, of the tuned model, and the predictions by sample."""
        require_fit(self.opened, prompts, self.sampling.max_new_tokens)

        def column(which: str) -> tuple[Sequence[Any], tuple[Metric, ...]]:
            set_seed(self.sampling.seed)
            progress = self.progress
            return run(None if progress is None else lambda done: progress(which, done))

        with without_adapter(self.opened):
            made, base = column("base" if self.opened.adapter else "model")
        if not self.opened.adapter:
            return compare(base, None, self.sampling.seed), [{"prediction": prediction} for prediction in made]
        made_tuned, tuned = column("tuned")
        both = [{"base": before, "tuned": after} for before, after in zip(made, made_tuned, strict=True)]
        return compare(base, tuned, self.sampling.seed), both

    def _token_accuracy(self, prompts: Sequence[Prompt], references: Sequence[str]) -> Metric:
        samples = zip(prompts, references, strict=True)
        tokenizer = self.opened.tokenizer
        pairs = [pair for prompt, text in samples for pair in continuations(tokenizer, prompt, [text])]
        rated = likelihoods(self.opened, pairs, self.batch_size)
        shares = [100 * likelihood.hits / likelihood.tokens for likelihood in rated if likelihood.tokens]
        left_out = (
            "" if len(shares) == len(rated) else f" ({len(shares)} of {len(rated)} samples: others have no tokens)"
        )
        return mean_metric(f"token accuracy{left_out}", shares)


def _versions(libraries: dict[str, str]) -> dict[str, str]:
    names = ("ktc", "torch", "transformers", "peft")
    return {**libraries, **{name: version for name in names if (version := versions.installed(name))}}
