"""Scores of answers against references: three definitions of BLEU and ROUGE, kept apart since their numbers differ.

Input: predictions and the same number of references. Output: frozen `Metric`s with the contribution of each sample, so
that a mean, a corpus score and their resamples are computed in the same way. Nothing is downloaded: every library used
here includes its data. Refused: a missing library (H230).
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.foundation import environment, versions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Statistics = NDArray[np.float64]

DefinitionName = Literal["kt", "lf", "std"]
_ORDERS = (1, 2, 3, 4)
_ROUGES = ("rouge-1", "rouge-2", "rouge-l")
_CJK = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]")  # scripts that put no spaces between words


@dataclass(frozen=True, slots=True)
class Metric:
    """`statistics` [samples, k] are summed over samples; `score(sum, samples)` converts the sum to percent."""

    name: str
    statistics: Statistics
    score: Callable[[Statistics, int], float]

    @property
    def value(self) -> float:
        return self.score(self.statistics.sum(0), len(self.statistics))


@dataclass(frozen=True, slots=True)
class Definition:
    """One definition: `text` describes it, `packages` are its libraries, `measure` computes it."""

    name: DefinitionName
    text: str
    packages: tuple[str, ...]
    measure: Callable[[Sequence[str], Sequence[str]], tuple[Metric, ...]]

    def versions(self) -> dict[str, str]:
        """Return the installed version of each library used."""
        return {name: versions.installed(name) or "missing" for name in self.packages}


def definition(name: DefinitionName) -> Definition:
    """Return the definition with this name. Raises `HostLacks` (H230) if one of its libraries is not installed."""
    chosen = _DEFINITIONS[name]
    missing = [package for package in chosen.packages if versions.installed(package) is None]
    if missing:
        message = f"`--metrics {name}` needs {', '.join(f'`{package}`' for package in missing)}, not installed here"
        raise HostLacks(Diagnostic("H230", message, hint="`pip install 'ktc[eval]'`"))
    return chosen


def mean_metric(name: str, values: Sequence[float]) -> Metric:
    """Return the mean over samples of percentages."""
    import numpy as np

    return Metric(name, np.asarray(values, dtype=np.float64).reshape(-1, 1), _mean)


def _mean(total: Statistics, samples: int) -> float:
    return float(total[0]) / samples if samples else 0.0


# The definitions of KTransformers and of LLaMA-Factory: sentence scores, averaged ----------------------------------
def _measure_kt(predictions: Sequence[str], references: Sequence[str]) -> tuple[Metric, ...]:
    cut = _jieba()
    words = [(cut(p), cut(r)) for p, r in zip(predictions, references, strict=True)]
    bleus = [_sentence_bleus(p, r) if _has_words(p, r) else [0.0] * len(_ORDERS) for p, r in words]
    return (
        *(mean_metric(f"bleu-{n}", [row[n - 1] for row in bleus]) for n in _ORDERS),
        *_rouge_chinese(words),
    )


def _measure_lf(predictions: Sequence[str], references: Sequence[str]) -> tuple[Metric, ...]:
    cut = _jieba()
    words = [(cut(p), cut(r)) for p, r in zip(predictions, references, strict=True)]
    bleus = [_sentence_bleus(list(p), list(r))[3] for p, r in zip(predictions, references, strict=True)]
    # LLaMA-Factory rounds each sample before averaging.
    return (mean_metric("bleu-4", [round(b, 4) for b in bleus]), *_rouge_chinese(words, digits=4))


def _has_words(*texts: Sequence[str]) -> bool:
    return all("".join(text).strip() for text in texts)


def _sentence_bleus(prediction: Sequence[str], reference: Sequence[str]) -> list[float]:
    """Return BLEU-1 to BLEU-4 of one sample in percent, smoothed by nltk's method 3."""
    nltk: Any = importlib.import_module("nltk.translate.bleu_score")
    smooth = nltk.SmoothingFunction().method3
    scores = (nltk.sentence_bleu([reference], prediction, (1 / n,) * n, smooth) for n in _ORDERS)
    return [100 * float(score) for score in scores]


def _rouge_chinese(words: Sequence[tuple[list[str], list[str]]], digits: int | None = None) -> tuple[Metric, ...]:
    """Return F of rouge_chinese over words, a mean over samples."""
    from rouge_chinese import Rouge

    scorer: Any = Rouge()
    rows: list[tuple[float, ...]] = []
    for prediction, reference in words:
        if _has_words(prediction, reference):
            scores = scorer.get_scores(" ".join(prediction), " ".join(reference))[0]
            rows.append(tuple(100 * float(scores[name]["f"]) for name in _ROUGES))
        else:
            rows.append((0.0,) * len(_ROUGES))
    rounded = rows if digits is None else [tuple(round(value, digits) for value in row) for row in rows]
    return tuple(mean_metric(name, [row[i] for row in rounded]) for i, name in enumerate(_ROUGES))


@cache
def _jieba() -> Callable[[str], list[str]]:
    """Return jieba's tokenizer, which keeps spaces. Its index is in ktc's cache, not in a world-writable folder."""
    import jieba

    jieba.setLogLevel(logging.CRITICAL)
    folder = environment.cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    cutter: Any = jieba.Tokenizer()
    cutter.tmp_dir = str(folder)
    return lambda text: list(cutter.cut(text))


# The definitions of the literature: sacrebleu over the corpus, rouge-score over samples ----------------------------
def _measure_std(predictions: Sequence[str], references: Sequence[str]) -> tuple[Metric, ...]:
    spaceless = any(_CJK.search(text) for text in references)
    return (
        *(_corpus_bleu(predictions, references, n, "zh" if spaceless else "13a") for n in _ORDERS),
        *_rouge_score(predictions, references, spaceless),
    )


def _corpus_bleu(predictions: Sequence[str], references: Sequence[str], order: int, tokenizer: str) -> Metric:
    """Return sacrebleu's BLEU of one order. A sample adds its matches and n-grams of each order and its two lengths."""
    import numpy as np
    from sacrebleu.metrics.bleu import BLEU

    bleu: Any = BLEU(max_ngram_order=order, tokenize=tokenizer)
    rows: list[list[float]] = []
    for prediction, reference in zip(predictions, references, strict=True):
        scored = bleu.corpus_score([prediction], [[reference]])
        rows.append([*scored.counts, *scored.totals, scored.sys_len, scored.ref_len])

    def score(total: Statistics, samples: int) -> float:
        counts = [round(value) for value in total.tolist()]
        made: Any = BLEU.compute_bleu(
            counts[:order], counts[order : 2 * order], *counts[2 * order :], smooth_method="exp", max_ngram_order=order
        )
        return float(made.score)

    return Metric(f"bleu-{order}", np.asarray(rows, dtype=np.float64).reshape(-1, 2 * order + 2), score)


def _rouge_score(predictions: Sequence[str], references: Sequence[str], spaceless: bool) -> tuple[Metric, ...]:
    """Return F of rouge-score: stemmed words, or jieba's words where its own tokenizer drops every character."""
    from rouge_score.rouge_scorer import RougeScorer

    names = [name.replace("-", "").replace("l", "L") for name in _ROUGES]
    make: Any = RougeScorer
    scorer = make(names, tokenizer=_Words(_jieba())) if spaceless else make(names, use_stemmer=True)
    rows = [scorer.score(reference, prediction) for prediction, reference in zip(predictions, references, strict=True)]
    return tuple(
        mean_metric(ours, [100 * float(row[name].fmeasure) for row in rows])
        for ours, name in zip(_ROUGES, names, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Words:
    """The tokenizer interface of rouge-score."""

    cut: Callable[[str], list[str]]

    def tokenize(self, text: str) -> list[str]:
        return [word for word in self.cut(text) if word.strip()]


_SEED_LIBRARIES = ("jieba", "nltk", "rouge-chinese")
_DEFINITIONS: Mapping[DefinitionName, Definition] = {
    "kt": Definition(
        "kt",
        "KTransformers: jieba words, spaces among them; sentence BLEU of orders 1 to 4, uniform weights, smoothing "
        "method 3 of nltk; F of rouge_chinese; means over samples. An empty prediction counts 0.",
        _SEED_LIBRARIES,
        _measure_kt,
    ),
    "lf": Definition(
        "lf",
        "LLaMA-Factory: sentence BLEU-4 of characters, smoothing method 3 of nltk; F of rouge_chinese over jieba "
        "words; each sample rounded to four digits; means over samples.",
        _SEED_LIBRARIES,
        _measure_lf,
    ),
    "std": Definition(
        "std",
        "The literature: sacrebleu's corpus BLEU of orders 1 to 4 (13a, or zh where a reference has Chinese, Japanese "
        "or Korean); F of rouge-score, stemmed (jieba words there), means over samples.",
        ("sacrebleu", "rouge-score", "jieba"),
        _measure_std,
    ),
}
