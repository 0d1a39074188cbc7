"""Scores are those of their definitions, to the digit, and no definition needs a network."""

from __future__ import annotations

import importlib.util
import socket

import pytest

from ktc.diagnostics import HostLacks
from ktc.foundation import versions
from ktc.inference.evaluate.metrics import DefinitionName, Metric, definition

LIBRARIES = ("jieba", "nltk", "rouge_chinese", "rouge_score", "sacrebleu")
pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in LIBRARIES), reason="the extra `eval` is not installed"
)

# The pairs (prediction, reference) of the comparison that the definitions were measured on.
ENGLISH = [
    ("The sum is 12, nya! The cat is happy.", "The sum of both is 12, nya! The cat is very happy."),
    ("", "Hello there."),
    ("I do not know", "The answer is five."),
]
CHINESE = [
    ("主人今天也要开心喵，晚饭吃鱼吧。", "主人今天要开心喵，晚饭就吃鱼吧！"),
    ("你好", "你好，世界"),
    ("猫", "狗在跑步"),
]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a socket fails."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a metric asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("NLTK_DATA", "/nonexistent")


def measured(name: DefinitionName, pairs: list[tuple[str, str]]) -> dict[str, Metric]:
    metrics = definition(name).measure([p for p, _ in pairs], [r for _, r in pairs])
    return {metric.name: metric for metric in metrics}


def values(name: DefinitionName, pairs: list[tuple[str, str]]) -> dict[str, float]:
    return {key: round(metric.value, 2) for key, metric in measured(name, pairs).items()}


ROUGE = ("rouge-1", "rouge-2", "rouge-l")
BLEU = ("bleu-1", "bleu-2", "bleu-3", "bleu-4")


def test_kt_gives_the_numbers_of_ktransformers() -> None:
    expected = (37.08, 30.15, 27.25, 24.92, 28.99, 24.00, 29.63)
    assert values("kt", ENGLISH) == dict(zip((*BLEU, *ROUGE), expected, strict=True))


def test_std_gives_the_numbers_of_sacrebleu_and_rouge_score() -> None:
    expected = (48.42, 44.83, 40.18, 38.04, 28.57, 21.05, 28.57)
    assert values("std", ENGLISH) == dict(zip((*BLEU, *ROUGE), expected, strict=True))


def test_lf_gives_the_numbers_of_llama_factory() -> None:
    assert values("lf", ENGLISH) == {"bleu-4": 23.37, "rouge-1": 28.99, "rouge-2": 24.00, "rouge-l": 29.63}


def test_corpus_bleu_from_what_samples_add_is_sacrebleus_own() -> None:
    from sacrebleu.metrics.bleu import BLEU as Bleu

    for pairs, tokenizer in ((ENGLISH, "13a"), (CHINESE, "zh")):
        found = measured("std", pairs)
        for order in range(1, 5):
            own = Bleu(max_ngram_order=order, tokenize=tokenizer)
            expected = own.corpus_score([p for p, _ in pairs], [[r for _, r in pairs]]).score
            assert found[f"bleu-{order}"].value == pytest.approx(expected, abs=1e-9)


def test_an_empty_prediction_counts_nothing_and_never_the_sample_before_it() -> None:
    names: tuple[DefinitionName, ...] = ("kt", "lf", "std")
    for name in names:
        for empty in ("", "   ", "\n") if name != "lf" else ("",):  # LLaMA-Factory counts spaces as characters
            assert all(metric.value == 0 for metric in measured(name, [(empty, "Hello there.")]).values())
    both = measured("kt", [ENGLISH[0], ("", "Hello there.")])
    alone = measured("kt", [ENGLISH[0]])
    assert both["bleu-1"].value == pytest.approx(alone["bleu-1"].value / 2)


def test_jieba_keeps_spaces_so_that_english_words_without_a_match_score_in_kt_alone() -> None:
    strangers = [("one two three four five", "cat dog bird fish horse")]
    assert values("kt", strangers)["bleu-1"] == 44.44
    assert values("kt", strangers)["rouge-1"] == 0
    assert values("std", strangers)["bleu-1"] < 20


def test_chinese_has_a_rouge_in_every_definition() -> None:
    assert values("std", CHINESE)["rouge-1"] == pytest.approx(values("kt", CHINESE)["rouge-1"], abs=8)
    assert values("std", CHINESE)["rouge-1"] > 20


def test_a_missing_library_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: None if name == "jieba" else installed(name))
    with pytest.raises(HostLacks) as refusal:
        definition("kt")
    (found,) = refusal.value.diagnostics
    assert found.code == "H230"
    assert "`jieba`" in found.message
    assert "ktc[eval]" in found.hint


def test_definitions_say_what_they_are_and_by_which_libraries() -> None:
    found = definition("kt")
    assert "method 3" in found.text
    assert set(found.versions()) == {"jieba", "nltk", "rouge-chinese"}
    assert all(version[0].isdigit() for version in found.versions().values())
