"""`ktc eval`: base and tuned from one load, what is counted as right, what is refused by name. All of it offline."""

from __future__ import annotations

import importlib.util
import json
import math
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from built_tokenizers import BUILT
from peft import LoraConfig
from strong_adapters import save_strong_adapter

from ktc.cli import app as cli
from ktc.diagnostics import InputRefused, Span
from ktc.inference.evaluate import run as evaluate
from ktc.inference.evaluate.comparison import compare
from ktc.inference.evaluate.data import Question, read_items, read_questions
from ktc.inference.evaluate.likelihood import continuations, likelihoods
from ktc.inference.evaluate.metrics import definition, mean_metric
from ktc.inference.evaluate.multiple_choice import ask, choose, extract
from ktc.inference.generate.answers import Sampling, answer, padded
from ktc.inference.generate.language_model import LanguageModel, open_language_model
from ktc.inference.generate.prompts import Prompt, render

LIBRARIES = ("jieba", "nltk", "rouge_chinese", "rouge_score", "sacrebleu")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in LIBRARIES), reason="the extra `eval` is not installed"
    ),
]
SHORT = Sampling(max_new_tokens=5)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an evaluation asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def opened(compiled: Path, adapter: Path) -> LanguageModel:
    return open_language_model(compiled, adapter=adapter, reference=True)


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    path = tmp_path / "held_out.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello to you."}]},
        {"messages": [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "Rain falls."}]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_with_images_are_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "images.jsonl"
    parts = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "What is it?"}]
    rows = ({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "A cat."}]}
            for content in ("What?", parts))  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputRefused, match="the row has images") as refused:
        read_items(path)
    (fault,) = refused.value.diagnostics
    assert fault.code == "V801" and fault.span is not None and fault.span.line == 2


def test_rows_with_tools_are_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "tools.jsonl"
    row = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    path.write_text(f"{json.dumps(row)}\n{json.dumps({**row, 'tools': [{'name': 'add'}]})}\n")
    with pytest.raises(InputRefused, match="`tools`") as refused:
        read_items(path)
    (fault,) = refused.value.diagnostics
    assert (fault.code, fault.span and fault.span.line) == ("V801", 2)
    assert len(read_items(path, limit=1)) == 1


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = cli.main(["eval", *map(str, arguments)])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def question(options: tuple[str, ...] = ("Paris", "Tokyo", "Rome"), right: str = "B") -> Question:
    return Question(Span("q.jsonl", 1, 1, 1, 2), "What is the capital of Japan?", options, right)


# Generation ------------------------------------------------------------------------------------------------------
def test_base_and_tuned_are_those_of_two_loads(compiled: Path, opened: LanguageModel, held_out: Path) -> None:
    items = read_items(held_out)
    found = evaluate.Evaluator(opened, SHORT, 2).generation(items, definition("kt"))
    plain = open_language_model(compiled, reference=True)
    alone = evaluate.Evaluator(plain, SHORT, 1).generation(items, definition("kt"))
    assert [line.base for line in found.lines] == [line.base for line in alone.lines]
    assert [row["base"] for row in found.predictions] == [row["prediction"] for row in alone.predictions]
    assert [row["tuned"] for row in found.predictions] != [row["base"] for row in found.predictions]
    assert found.predictions[0]["tuned"] == answer(opened, render(opened, items[0].prompt), SHORT)[0].text.strip()
    assert all(line.tuned is None and line.interval is None for line in alone.lines)
    for line in found.lines:
        assert line.tuned is not None and line.delta == line.tuned - line.base


def test_perfect_predictions_score_a_hundred(
    opened: LanguageModel, held_out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = read_items(held_out)
    perfect = [type("A", (), {"text": item.reference})() for item in items]
    monkeypatch.setattr(evaluate, "answer_all", lambda *_: (perfect, None))
    for name in ("kt", "std"):
        lines = evaluate.Evaluator(opened, SHORT).generation(items, definition(name)).lines
        rouge = [line.base for line in lines if line.name.startswith("rouge")]
        assert rouge == pytest.approx([100] * 3)


def test_rows_of_prompt_and_completion_are_asked_without_the_template(opened: LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "plain.jsonl"
    path.write_text(json.dumps({"prompt": "Question: 1 + 1? Answer:", "completion": " 2"}))
    found = evaluate.Evaluator(opened, SHORT).generation(read_items(path), definition("lf"))
    assert found.predictions[0]["prompt"] == "Question: 1 + 1? Answer:"
    assert found.predictions[0]["reference"] == " 2"


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_the_base_is_the_model_without_what_the_adapter_changed(
    init: Literal["pissa", "olora"], compiled: Path, held_out: Path, tmp_path: Path
) -> None:
    config = LoraConfig(r=3, target_modules=["o_proj"], init_lora_weights=init)
    folder = save_strong_adapter(compiled, config, tmp_path / "adapter", 3)
    items, columns = read_items(held_out), list[dict[str, Any]]()
    for adapter in (None, folder):
        opened = open_language_model(compiled, adapter=adapter, reference=True)
        found = evaluate.Evaluator(opened, SHORT).generation(items, definition("lf"), token_accuracy=True)
        columns.append({"lines": [line.base for line in found.lines], "rows": found.predictions})
    assert columns[0]["lines"] == columns[1]["lines"]
    assert [row["prediction"] for row in columns[0]["rows"]] == [row["base"] for row in columns[1]["rows"]]


def test_samples_without_tokens_are_counted_in_the_name(opened: LanguageModel, held_out: Path) -> None:
    items = read_items(held_out)
    items = (items[0], replace(items[1], reference=""))
    found = evaluate.Evaluator(opened, SHORT).generation(items, definition("lf"), token_accuracy=True)
    names = [line.name for line in found.lines if line.name.startswith("token accuracy")]
    assert names == ["token accuracy (1 of 2 samples: others have no tokens)"]


def test_token_accuracy_is_counted_behind_the_reference_and_has_its_own_name(
    opened: LanguageModel, held_out: Path
) -> None:
    found = evaluate.Evaluator(opened, SHORT).generation(read_items(held_out), definition("lf"), token_accuracy=True)
    assert [line.name for line in found.lines] == ["bleu-4", "rouge-1", "rouge-2", "rouge-l", "token accuracy"]
    assert "token accuracy" in found.definition


# Likelihoods -----------------------------------------------------------------------------------------------------
def test_likelihoods_do_not_depend_on_the_batch_and_are_those_of_the_logits(opened: LanguageModel) -> None:
    import torch

    texts = [("Hello", " you"), ("What is the capital of France?", " Paris and Rome"), ("Rain", " falls")]
    encode = opened.tokenizer
    pairs = [tuple(encode(part, add_special_tokens=False)["input_ids"] for part in text) for text in texts]
    together, alone = likelihoods(opened, pairs, 3), likelihoods(opened, pairs, 1)
    for (prompt, continuation), one, other in zip(pairs, together, alone, strict=True):
        assert one.log == pytest.approx(other.log, abs=1e-4)
        inputs = padded(opened, [[*prompt, *continuation]], "left")
        with torch.no_grad():
            logs = opened.model(**inputs).logits[0].log_softmax(-1)
        expected = sum(float(logs[len(prompt) - 1 + i, token]) for i, token in enumerate(continuation))
        assert one.log == pytest.approx(expected, abs=1e-4)
        assert one.tokens == len(continuation)


def test_a_generated_token_is_the_likeliest(opened: LanguageModel) -> None:
    prompt = render(opened, "Hello")
    tokens = opened.model.generate(
        **padded(opened, [prompt.input_ids], "left"), max_new_tokens=4, do_sample=False, pad_token_id=0
    )[0, len(prompt.input_ids) :].tolist()
    (found,) = likelihoods(opened, [(prompt.input_ids, tokens)], 1)
    assert found.hits == found.tokens == len(tokens)


def test_a_text_is_rated_in_the_tokens_that_it_has_after_its_prompt() -> None:
    joining, spacing = BUILT["byte-level BPE"](), BUILT["SentencePiece BPE, a space before all"]()
    prompt = Prompt("Say: the capital ", (), special=True)
    ((before, rated),) = continuations(joining, prompt, ["of France"])
    assert (joining.decode(before), joining.decode(rated)) == ("Say: the capital", " of France")
    ((before, rated),) = continuations(spacing, Prompt("un", ()), ["happy"])
    assert before + rated == spacing("unhappy")["input_ids"]
    assert spacing.convert_ids_to_tokens(before) == ["<s>"]  # one token holds both


def test_texts_that_are_compared_begin_after_the_same_tokens() -> None:
    tokenizer = BUILT["byte-level BPE"]()
    one, other = continuations(tokenizer, Prompt("the capital ", (), special=False), ["of", "(of)"])
    assert one[0] == other[0] == tokenizer("the capital")["input_ids"]
    assert [tokenizer.decode(rated) for _, rated in (one, other)] == [" of", " (of)"]


def test_special_tokens_after_every_text_are_not_rated() -> None:
    tokenizer = BUILT["WordPiece"]()
    ((before, rated),) = continuations(tokenizer, Prompt("the capital", ()), [" of"])
    assert tokenizer.convert_ids_to_tokens(before)[0] == "[CLS]"
    assert tokenizer.convert_ids_to_tokens(rated) == ["of"]


# Multiple choice -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"), (" B.", "B"), ("(C)", "C"), ("B) Tokyo", "B"), ("The answer is C.", "C"), ("Answer: A", "A"),
        ("**B**", "B"), ("The correct answer is (B), I think.", "B"), ("Tokyo", "B"), ("tokyo.", "B"),
        ("A city is a place", ""), ("D", ""), ("", ""), ("I do not know", ""), ("Because of that, C.", "C"),
        ("B\nbecause A is wrong", "B"), ("The answer is **B**", "B"), ("**Answer:** C", "C"),
    ],
)  # fmt: skip
def test_letters_are_found_in_answers(text: str, letter: str) -> None:
    assert extract(text, question()) == letter


def test_choices_by_likelihood_are_the_likeliest_letter(opened: LanguageModel) -> None:
    asked = question()
    prompt = ask(opened, asked)
    assert prompt.text.endswith("right option.<|end|><|assistant|>")
    (found,) = choose(opened, [asked], [prompt], "logprob", SHORT, 2)
    assert found.letter == asked.letters[found.logs.index(max(found.logs))]
    assert len(found.logs) == 3 and all(math.isfinite(log) and log < 0 for log in found.logs)
    raw = ask(opened, asked, raw=True)
    assert raw.text == "What is the capital of Japan?\nA. Paris\nB. Tokyo\nC. Rome\nAnswer:"


def test_accuracy_counts_right_letters_of_base_and_tuned(opened: LanguageModel) -> None:
    asked = [question(right=letter) for letter in "ABC"]
    found = evaluate.Evaluator(opened, SHORT).choices(asked, "logprob")
    (line,) = found.lines
    assert line.name == "accuracy"
    assert line.base == pytest.approx(100 / 3)  # the same question thrice, each letter right once
    assert line.tuned == pytest.approx(100 / 3)
    by_text = evaluate.Evaluator(opened, SHORT).choices(asked, "text")
    assert [each.name for each in by_text.lines] == ["accuracy", "without a letter"]


# Intervals -------------------------------------------------------------------------------------------------------
def test_the_interval_of_a_difference_is_paired_and_repeatable() -> None:
    base = mean_metric("m", [float(10 * (at % 7)) for at in range(60)])
    better = mean_metric("m", [10.0 * (at % 7) + 5 for at in range(60)])
    (line,) = compare([base], [better], 0)
    assert line.delta == pytest.approx(5)
    assert line.interval == pytest.approx((5, 5))  # each sample gains as much: however they vary, that is sure
    unsure = mean_metric("m", [10.0 * ((at * 5) % 7) for at in range(60)])
    (first,), (second,) = compare([base], [unsure], 3), compare([base], [unsure], 3)
    assert first == second
    assert first.interval is not None and first.delta is not None
    assert first.interval[0] < first.delta < first.interval[1]


def test_corpus_scores_have_intervals_too() -> None:
    references = ["the cat sat on the mat today", "rain falls on the hills and runs", "a small dog barks at the moon"]
    worse = ["the cat sat on a mat", "rain falls on hills", "a dog barks"]
    std = definition("std")
    lines = compare(std.measure(worse, references), std.measure(references, references), 0)
    bleu = next(line for line in lines if line.name == "bleu-4")
    assert bleu.tuned == pytest.approx(100)
    assert bleu.interval is not None and 0 < bleu.interval[0] <= bleu.interval[1] < 100.001


# What is refused -------------------------------------------------------------------------------------------------
def test_every_bad_question_is_told_with_its_line(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"question": "q", "options": ["a", "b"], "answer": "B"},
        {"question": "q", "options": ["a", "b"], "answer": "C"},
        {"question": "q", "options": ["a"], "answer": "A"},
        {"question": "q", "options": ["a", "a"], "answer": "A"},
        {"question": "", "options": ["a", "b"], "answer": "A"},
        {"options": ["a", "b"], "answer": "A"},
        {"question": "q", "options": {"A": "a", "C": "b"}, "answer": "A"},
        {"question": "q", "options": ["a", "b"], "answer": True},
        ["list"],
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n{broken\n")
    with pytest.raises(InputRefused) as refused:
        read_questions(path)
    places = [(each.code, each.span.line if each.span else 0) for each in refused.value.diagnostics]
    assert places == [("V802", line) for line in range(2, 11)]


def test_answers_may_be_letters_numbers_or_words(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    answers: list[Any] = ["B", "b", 1, "two"]
    rows = [{"question": "q", "options": ["one", "two"], "answer": each} for each in answers]
    rows.append({"question": "q", "options": {"A": "one", "B": "two"}, "answer": "B"})
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [each.answer for each in read_questions(path)] == ["B"] * 5


@pytest.mark.parametrize(
    ("options", "content", "code"),
    [
        (["--mcq-by", "text"], "", "V804"),
        (["--task", "mcq", "--metrics", "kt"], "", "V804"),
        (["--raw"], "", "V804"),
        (["--task", "mcq", "--mcq-by", "logprob", "--temperature", "0.7"], "", "V804"),
        (["--task", "mcq", "--mcq-by", "logprob", "--max-new-tokens", "3"], "", "V804"),
        (["--task", "mcq", "--format", "alpaca"], "", "V804"),
        (["--format", "alpaca"], '{"prompt": "a", "completion": "b"}', "T514"),
        (["--task", "mcq"], "", "V802"),
        ([], "", "T511"),
        ([], '{"text": "only text"}', "V801"),
        ([], '{"prompt": "a"}', "T514"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_loading(
    compiled: Path, tmp_path: Path, run: Run, options: list[str], content: str, code: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    status, _, err = run(compiled, "--data", path, *options)
    assert status == 2
    assert f"[{code}]" in err, err


# The command -----------------------------------------------------------------------------------------------------
def test_the_table_has_both_columns_the_definition_and_the_versions(
    compiled: Path, adapter: Path, held_out: Path, tmp_path: Path, run: Run
) -> None:
    predictions = tmp_path / "predictions.jsonl"
    common = (compiled, "--data", held_out, "--reference", "--max-new-tokens", "5")
    code, out, _ = run(*common, "--adapter", adapter, "-o", predictions)
    assert code == 0
    assert all(word in out for word in ("base", "tuned", "delta", "bleu-4", "rouge-l", "method 3", "jieba 0."))
    rows = [json.loads(line) for line in predictions.read_text(encoding="utf-8").splitlines()]
    assert [row["line"] for row in rows] == [1, 2]
    assert set(rows[0]) == {"line", "prompt", "reference", "base", "tuned"}


def test_json_is_one_object_and_the_limit_counts(compiled: Path, held_out: Path, run: Run) -> None:
    options = ("--reference", "--max-new-tokens", "3", "--limit", "1", "--metrics", "std", "--json")
    code, out, _ = run(compiled, "--data", held_out, *options)
    found = json.loads(out)
    assert code == 0
    assert (found["samples"], found["task"], found["adapter"]) == (1, "generation", None)
    assert found["metrics"][0]["name"] == "bleu-1"
    assert "sacrebleu" in found["versions"] and "transformers" in found["versions"]
