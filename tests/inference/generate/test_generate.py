"""`ktc generate`: what is asked, how tokens are chosen, and what is refused by name."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from ktc.cli import app as cli
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.inference.generate import answers as generate
from ktc.inference.generate import chat
from ktc.inference.generate.answers import Answer, Pace, Sampling, answer, read_in_chunks
from ktc.inference.generate.batch import answer_rows, jsonl
from ktc.inference.generate.chat import converse
from ktc.inference.generate.language_model import LanguageModel, open_language_model, without_adapter
from ktc.inference.generate.prompts import Message, read_rows, render, require_fit

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = Sampling(max_new_tokens=6)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def opened(compiled: Path) -> LanguageModel:
    return open_language_model(compiled, reference=True)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = cli.main(["generate", *map(str, arguments)])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def code_of(refused: pytest.ExceptionInfo[InputRefused]) -> list[str]:
    return [diagnostic.code for diagnostic in refused.value.diagnostics]


# What is asked ---------------------------------------------------------------------------------------------------
def test_a_prompt_is_a_turn_of_the_user_where_there_is_a_template(opened: LanguageModel) -> None:
    prompt = render(opened, "Hello", system="Be brief.")
    assert prompt.text == "<|begin|><|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>"
    assert prompt.input_ids[0] == opened.tokenizer.bos_token_id
    assert prompt.input_ids.count(opened.tokenizer.bos_token_id) == 1
    assert render(opened, "Hello", raw=True).text == "Hello"


def test_without_a_template_turns_are_joined_as_training_joins_them(
    opened: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened.tokenizer, "chat_template", None)
    turns = [Message("user", "One?"), Message("assistant", "One."), Message("user", "Two?")]
    assert render(opened, turns).text == "One?\nOne.<|end|>Two?\n"
    assert render(opened, "One?").text == "One?"


def test_greedy_answers_are_those_of_generate(opened: LanguageModel) -> None:
    prompt = render(opened, "Hello")
    inputs = generate.padded(opened, [prompt.input_ids], "left")
    expected = opened.model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, len(prompt.input_ids) :]
    found, pace = answer(opened, prompt, SHORT)
    assert found.text == opened.tokenizer.decode(expected, skip_special_tokens=True)
    assert found.num_tokens == len(expected) == pace.new_tokens
    assert pace.first_seconds is not None and 0 < pace.first_seconds <= pace.seconds


def test_prompts_are_read_in_chunks_with_the_same_answer(
    opened: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, lengths = render(opened, "one two three four five six"), list[int]()
    wanted, _ = answer(opened, prompt, Sampling(max_new_tokens=5))
    monkeypatch.setattr(opened.model.generation_config, "prefill_chunk_size", None)
    handle = opened.model.get_input_embeddings().register_forward_hook(
        lambda _, given, __: lengths.append(given[0].shape[1])
    )
    read_in_chunks(opened, 3)
    found, _ = answer(opened, prompt, Sampling(max_new_tokens=5))
    handle.remove()
    assert found == wanted
    assert max(lengths) == 3


def test_streamed_pieces_make_the_answer(opened: LanguageModel) -> None:
    for stop in ((), ("e", "zz"), ("the",)):
        pieces: list[str] = []
        found, _ = answer(opened, render(opened, "Hello"), Sampling(24, stop=stop), pieces.append)
        assert "".join(pieces) == found.text
        assert not any(word in found.text for word in stop)


def test_draws_follow_the_seed(opened: LanguageModel) -> None:
    def drawn(seed: int) -> str:
        generate.set_seed(seed)
        return answer(opened, render(opened, "Hello"), Sampling(12, temperature=1.5, seed=seed))[0].text

    assert drawn(1) == drawn(1)
    assert len({drawn(1), drawn(2), drawn(3)}) > 1


def test_a_batch_answers_as_its_rows_alone(opened: LanguageModel, tmp_path: Path) -> None:
    asked = ["Hi", "What is the capital of France, and what is that of Japan?", "Rain falls on the hills"]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prompt": text}) + "\n" for i, text in enumerate(asked)))
    rows = read_rows(path)
    together, pace = answer_rows(opened, rows, SHORT, batch_size=3)
    alone, _ = answer_rows(opened, rows, SHORT, batch_size=1)
    assert together == alone
    assert [row["id"] for row in together] == [0, 1, 2]
    assert [row["prompt"] for row in together] == asked
    assert pace.new_tokens == sum(row["generated_tokens"] for row in together)
    for row, text in zip(together, asked, strict=True):
        assert row["generated"] == answer(opened, render(opened, text), SHORT)[0].text


# Conversations ---------------------------------------------------------------------------------------------------
def test_a_conversation_remembers_until_it_is_reset(opened: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def echo(_: object, prompt: Any, *__: object) -> tuple[Answer, Pace]:
        seen.append(prompt.text)
        return Answer(f"answer {len(seen)}", 2, "stop"), Pace(1, 2, 0.1)

    monkeypatch.setattr(chat, "answer", echo)
    told: list[str | Diagnostic] = []
    lines = ["one\n", "two\n", "/reset\n", "\n", "/what\n", "three\n", "/exit\n", "never\n"]
    paces = converse(opened, SHORT, lines, lambda _: None, told.append, system="S")
    system = "<|begin|><|system|>S<|end|>"
    assert len(paces) == 3
    assert seen[0] == f"{system}<|user|>one<|end|><|assistant|>"
    assert seen[1] == f"{system}<|user|>one<|end|><|assistant|>answer 1<|end|><|user|>two<|end|><|assistant|>"
    assert seen[2] == f"{system}<|user|>three<|end|><|assistant|>"
    assert any("no command `/what`" in str(line) for line in told)


def test_a_turn_that_does_not_fit_is_told_and_forgotten(opened: LanguageModel) -> None:
    told: list[str | Diagnostic] = []
    assert opened.max_length is not None
    long = "word " * opened.max_length
    paces = converse(opened, SHORT, [long, "Hi"], lambda _: None, told.append)
    assert len(paces) == 1
    assert [each.code for each in told if isinstance(each, Diagnostic)] == ["G703"]


def test_an_interrupt_ends_the_answer_and_not_the_program(opened: LanguageModel) -> None:
    pieces: list[str] = []

    def interrupt(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    told: list[str | Diagnostic] = []
    before = signal.getsignal(signal.SIGINT)
    (pace,) = converse(opened, Sampling(200), ["Hello"], interrupt, told.append)
    assert pace.new_tokens < 200
    assert "interrupted" in str(told[-1])
    assert signal.getsignal(signal.SIGINT) is before


def test_what_is_interrupted_before_it_begins_ends_with_its_first_token(opened: LanguageModel) -> None:
    stop = Event()
    stop.set()
    found, _ = answer(opened, render(opened, "Hello"), Sampling(50), None, stop)
    assert (found.num_tokens, found.finish) == (1, "interrupted")


# Adapters --------------------------------------------------------------------------------------------------------
def test_an_adapter_changes_the_answer_and_its_base_stays_in_reach(compiled: Path, adapter: Path) -> None:
    tuned = open_language_model(compiled, adapter=adapter, reference=True)
    prompt = render(tuned, "Hello")
    with_it = answer(tuned, prompt, SHORT)[0].text
    with without_adapter(tuned):
        base = answer(tuned, prompt, SHORT)[0].text
    plain = open_language_model(compiled, reference=True)
    assert base == answer(plain, prompt, SHORT)[0].text
    assert with_it != base


def test_an_adapter_of_another_model_is_refused(compiled: Path, adapter: Path, tmp_path: Path, run: Run) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in adapter.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "somebody/another-model"
    (other / "adapter_config.json").write_text(json.dumps(config))
    code, _, err = run(compiled, "--prompt", "Hi", "--adapter", other, "--reference")
    assert code == 2
    assert "A603" in err and "another-model" in err


# What is refused -------------------------------------------------------------------------------------------------
def test_a_prompt_that_is_too_long_is_refused_with_what_is_left(opened: LanguageModel) -> None:
    assert opened.max_length is not None
    prompt = render(opened, "Hello")
    with pytest.raises(InputRefused) as refused:
        require_fit(opened, [prompt], opened.max_length)
    assert code_of(refused) == ["G703"]
    assert f"--max-new-tokens {opened.max_length - len(prompt.input_ids)}" in refused.value.diagnostics[0].hint
    assert require_fit(opened, [prompt], None) == opened.max_length - len(prompt.input_ids)


def test_every_bad_row_is_told_with_its_line(tmp_path: Path) -> None:
    bad = [
        '{"prompt": "good"}',
        "{no json",
        '{"promt": "typo"}',
        "",
        '{"prompt": "a", "messages": []}',
        '{"messages": [{"role": "assistant", "content": "last"}]}',
        '{"prompt": "a", "generated": "b"}',
        '["a list"]',
        '{"prompt": "  "}',
        '{"prompt": "a", "finish": "mine"}',
    ]
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(bad))
    with pytest.raises(InputRefused) as refused:
        read_rows(path)
    places = [(each.code, each.span.line if each.span else 0) for each in refused.value.diagnostics]
    assert places == [("G706", line) for line in (2, 3, 5, 6, 7, 8, 9, 10)]
    assert "did you mean `prompt`?" in refused.value.diagnostics[1].hint


def test_half_a_character_is_refused_in_a_prompt_and_kept_in_another_field(opened: LanguageModel) -> None:
    with pytest.raises(InputRefused) as refused:
        render(opened, "a\ud83d")
    assert code_of(refused) == ["G706"]
    row = {"id": "\ud83d", "prompt": "é"}
    assert json.loads(jsonl([row]).encode()) == row


@pytest.mark.parametrize(
    ("content", "code"), [(b"", "G702"), (b"\n \n", "G702"), (b'{"prompt": "caf\xe9"}\n', "G705"), (None, "G705")]
)
def test_files_that_ask_nothing_are_refused(tmp_path: Path, content: bytes | None, code: str) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputRefused) as refused:
        read_rows(path)
    assert code_of(refused) == [code]


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        ([], ["G700"]),
        (["--prompt", "a", "--chat"], ["G700"]),
        (["--prompt", "a", "-o", "x.jsonl"], ["G700"]),
        (["--chat", "--json"], ["G700"]),
        (["--prompt", " "], ["G702"]),
        (["--prompt", "a", "--top-p", "0.5"], ["G707"]),
        (["--prompt", "a", "--temperature", "1", "--top-p", "0"], ["G707"]),
        (["--prompt", "a", "--stop", ""], ["G707"]),
        (["--prompt", "a", "--adapter", "/nowhere"], ["A601"]),
    ],
)
def test_options_that_cannot_be_are_refused_before_loading(
    compiled: Path, options: Sequence[str], codes: list[str], run: Run
) -> None:
    code, _, err = run(compiled, *options)
    assert code == 2
    assert all(f"error[{each}]" in err for each in codes), err


def test_a_model_without_a_tokenizer_is_refused(compiled: Path, tmp_path: Path) -> None:
    (tmp_path / "ktc.json").write_bytes((compiled / "ktc.json").read_bytes())
    with pytest.raises(InputRefused) as refused:
        open_language_model(tmp_path)
    assert code_of(refused) == ["G701"]
    with pytest.raises(InputRefused) as refused:
        open_language_model(tmp_path / "nowhere")
    assert code_of(refused) == ["L400"]


# The command -----------------------------------------------------------------------------------------------------
def test_the_answer_alone_is_on_stdout(compiled: Path, opened: LanguageModel, run: Run) -> None:
    code, out, err = run(compiled, "--prompt", "Hello", "--reference", "--max-new-tokens", "6")
    assert code == 0
    assert out == answer(opened, render(opened, "Hello"), SHORT)[0].text + "\n"
    assert "token/s" in err


def test_json_says_how_tokens_were_chosen(compiled: Path, run: Run) -> None:
    options = ("--prompt", "Hello", "--reference", "--max-new-tokens", "3", "--temperature", "0.8", "--seed", "5")
    code, out, _ = run(compiled, *options, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["sampling"]["seed"], found["new_tokens"]) == (5, 3)
    assert json.loads(run(compiled, *options, "--json")[1])["text"] == found["text"]


def test_a_file_is_answered_into_a_file(compiled: Path, tmp_path: Path, run: Run) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "Hi", "id": "ä"}\n{"messages": [{"role": "user", "content": "Ho"}], "n": [1]}\n')
    code, out, _ = run(compiled, "--file", prompts, "-o", answers, "--reference", "--max-new-tokens", "3")
    assert (code, out) == (0, "")
    rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    assert rows[0]["id"] == "ä" and rows[1]["n"] == [1]
    assert all(row["generated_tokens"] == 3 and row["finish"] == "length" for row in rows)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_conversation_reads_lines_and_ends_with_them(
    compiled: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n/reset\nHello\n"))
    code, out, err = run(compiled, "--chat", "--reference", "--max-new-tokens", "4")
    assert code == 0
    first, second = out.splitlines()[: len(out.splitlines()) // 2], out.splitlines()[len(out.splitlines()) // 2 :]
    assert first == second
    assert "the conversation is cleared" in err


def test_every_line_of_jsonl_ends_with_a_newline() -> None:
    """Two files of rows can be joined by `cat`, and no row is lost by a reader of lines."""
    rows = [{"id": 1, "text": "ä"}, {"id": 2, "text": "\ud83d"}]
    assert jsonl(rows[:1]) == '{"id": 1, "text": "ä"}\n'
    assert jsonl(rows).count("\n") == 2
    assert jsonl(rows).endswith("\n")
    assert [json.loads(line) for line in jsonl(rows).splitlines()] == rows
    assert jsonl([]) == ""


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_server_is_named_next_where_it_takes_the_tokenizer(
    is_fast: bool, run: Run, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LanguageModel, "streams", is_fast)
    code, _, err = run(compiled, "--prompt", "Hello", "--max-new-tokens", "1", "--reference")
    assert code == 0
    assert ("next: ktc serve" in err) == is_fast
