"""Evaluate a compiled model with and without its adapter: one load, two columns.

Input: a `LanguageModel`, items or questions, and a definition of scores. Output: a frozen `Evaluation` with the
definition, the versions of the libraries used, and every prediction. No network access.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import versions
from ktc.foundation.text_files import bounded
from ktc.inference.evaluate.comparison import RESAMPLES, Line, compare
from ktc.inference.evaluate.data import Item, Question
from ktc.inference.evaluate.likelihood import continuations, likelihoods
from ktc.inference.evaluate.metrics import Definition, Metric, mean_metric
from ktc.inference.evaluate.multiple_choice import DEFINITIONS, By, Choice, ask, choose
from ktc.inference.generate.answers import Sampling, answer_all, set_seed
from ktc.inference.generate.language_model import LanguageModel, without_adapter
from ktc.inference.generate.prompts import Prompt, render, require_fit

Progress = Callable[[str, int], None]
"""Receives the running task and the number of samples done."""
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


def evaluate_generation(
    opened: LanguageModel,
    items: Sequence[Item],
    definition: Definition,
    sampling: Sampling,
    *,
    batch_size: int = 8,
    system: str = "",
    token_accuracy: bool = False,
    progress: Progress | None = None,
) -> Evaluation:
    """Score answers to the items against their references. Raises InputRefused (G702, G703, G706)."""
    prompts = _rendered(items, lambda item: render(opened, item.asked, system=system, raw=item.raw, place=item.place))
    require_fit(opened, prompts, sampling.max_new_tokens)
    references = [item.reference for item in items]

    def run(which: str) -> tuple[list[str], tuple[Metric, ...]]:
        set_seed(sampling.seed)
        answers, _ = answer_all(opened, prompts, sampling, batch_size, _told(progress, which))
        texts = [answer.text.strip() for answer in answers]
        more = [_token_accuracy(opened, prompts, references, batch_size)] if token_accuracy else []
        return texts, (*definition.measure(texts, references), *more)

    base, tuned = _both(opened, run)
    predictions = tuple(
        {"line": item.place.line, "prompt": prompt.text, "reference": item.reference, **_columns(base, tuned, at)}
        for at, (item, prompt) in enumerate(zip(items, prompts, strict=True))
    )
    text = f"{definition.text} {TOKEN_ACCURACY}." if token_accuracy else definition.text
    lines = compare(base[1], tuned[1] if tuned else None, sampling.seed)
    return Evaluation("generation", text, _versions(definition.versions()), len(items), lines, predictions)


def evaluate_choices(
    opened: LanguageModel,
    questions: Sequence[Question],
    by: By,
    sampling: Sampling,
    *,
    batch_size: int = 8,
    system: str = "",
    raw: bool = False,
    progress: Progress | None = None,
) -> Evaluation:
    """Return the share of right letters. Raises InputRefused (G703, G706)."""
    prompts = _rendered(questions, lambda question: ask(opened, question, system=system, raw=raw))
    require_fit(opened, prompts, sampling.max_new_tokens)

    def run(which: str) -> tuple[list[Choice], tuple[Metric, ...]]:
        set_seed(sampling.seed)
        chosen = choose(opened, questions, prompts, by, sampling, batch_size, _told(progress, which))
        right = [100.0 * (c.letter == q.answer) for c, q in zip(chosen, questions, strict=True)]
        without = [100.0 * (not c.letter) for c in chosen]
        unanswered = [mean_metric("without a letter", without)] if by == "text" else []
        return chosen, (mean_metric("accuracy", right), *unanswered)

    base, tuned = _both(opened, run)
    predictions = tuple(
        {"line": q.place.line, "question": q.text, "answer": q.answer, **_columns(base, tuned, at)}
        for at, q in enumerate(questions)
    )
    lines = compare(base[1], tuned[1] if tuned else None, sampling.seed)
    return Evaluation("mcq", DEFINITIONS[by], _versions({}), len(questions), lines, predictions)


def _both(opened: LanguageModel, run: Callable[[str], Any]) -> tuple[Any, Any]:
    """Return the result of the base and, with an adapter, that of the tuned model."""
    with without_adapter(opened):
        base = run("base" if opened.adapter else "model")
    return base, run("tuned") if opened.adapter else None


def _rendered(samples: Sequence[Any], make: Callable[[Any], Prompt]) -> list[Prompt]:
    prompts, faults = list[Prompt](), list[Diagnostic]()
    for sample in samples:
        try:
            prompts.append(make(sample))
        except InputRefused as refusal:
            faults += refusal.diagnostics
    if faults:
        raise InputRefused(*bounded(faults))
    return prompts


def _token_accuracy(
    opened: LanguageModel, prompts: Sequence[Prompt], references: Sequence[str], batch_size: int
) -> Metric:
    each = zip(prompts, references, strict=True)
    pairs = [pair for prompt, text in each for pair in continuations(opened.tokenizer, prompt, [text])]
    found = likelihoods(opened, pairs, batch_size)
    shares = [100 * each.hits / each.tokens for each in found if each.tokens]
    left_out = "" if len(shares) == len(found) else f" ({len(shares)} of {len(found)} samples: others have no tokens)"
    return mean_metric(f"token accuracy{left_out}", shares)


def _columns(base: Any, tuned: Any, at: int) -> dict[str, Any]:
    """Return the predictions of one sample: `prediction`, or `base` and `tuned`."""
    names = {"prediction": base} if tuned is None else {"base": base, "tuned": tuned}
    return {name: _plain(run[0][at]) for name, run in names.items()}


def _plain(prediction: str | Choice) -> Any:
    return prediction if isinstance(prediction, str) else asdict(prediction)


def _told(progress: Progress | None, which: str) -> Callable[[int], None] | None:
    return None if progress is None else lambda done: progress(which, done)


def _versions(libraries: dict[str, str]) -> dict[str, str]:
    names = ("ktc", "torch", "transformers", "peft")
    return {**libraries, **{name: found for name in names if (found := versions.installed(name))}}
