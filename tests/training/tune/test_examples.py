"""Training data: each format as turns, each fault by its line, and tokens with a mask of what is learned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.stage_progress import listening
from ktc.foundation.text_files import MOST_FAULTS
from ktc.training.tune.examples import StreamedExamples, TrainingData, read_training_data, stream_training_data
from ktc.training.tune.tokenised import NOT_LEARNED, tokenise

ALPACA = {"instruction": "2 + 2?", "input": "in words", "output": "four"}
SHAREGPT = {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}
TURNS = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
MESSAGES = {"messages": TURNS}


def written(folder: Path, content: str | bytes, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refusals(path: Path, wanted: Any = "auto") -> list[Diagnostic]:
    with pytest.raises(InputRefused) as refused:
        read_training_data(path, wanted)
    return list(refused.value.diagnostics)


FORMATS = {
    "alpaca": (ALPACA, [("user", "2 + 2?\nin words"), ("assistant", "four")]),
    "sharegpt": (SHAREGPT, [("user", "2 + 2?"), ("assistant", "4")]),
    "messages": (MESSAGES, [("user", "2 + 2?"), ("assistant", "4")]),
    "prompt": ({"prompt": "2 + 2 =", "completion": " 4"}, [("prompt", "2 + 2 ="), ("completion", " 4")]),
    "text": ({"text": "Two and two."}, [("text", "Two and two.")]),
}


@pytest.mark.parametrize("form", FORMATS)
def test_a_format_is_found_from_its_keys(form: str, tmp_path: Path) -> None:
    row, turns = FORMATS[form]
    for content, name in ((json.dumps(row), "lines.jsonl"), (json.dumps([row], indent=1), "listed.json")):
        data = read_training_data(written(tmp_path, content, name))
        assert (data.format, data.detected) == (form, True)
        assert [(turn.role, turn.content) for turn in data.examples[0].turns] == turns


def test_alpaca_takes_a_system_and_a_history(tmp_path: Path) -> None:
    row = {**ALPACA, "input": "", "system": "Be brief.", "history": [["1 + 1?", "2"]]}
    data = read_training_data(written(tmp_path, json.dumps(row)))
    assert [turn.role for turn in data.examples[0].turns] == ["system", "user", "assistant", "user", "assistant"]


def test_a_text_file_has_a_row_for_each_stretch_between_blank_lines(tmp_path: Path) -> None:
    data = read_training_data(written(tmp_path, "one\nstill one\n\n\ntwo\n", "book.txt"))
    assert [(each.line, each.turns[0].content) for each in data.examples] == [(1, "one\nstill one"), (5, "two")]


REFUSED = {
    "a wrong key": ('{"instruct": "a", "output": "b"}', "T514", 1, "`instruct` should be `instruction`"),
    "a row that is no object": ("3", "T514", 1, ""),
    "nothing": ("", "T511", None, ""),
    "an empty list": ("[]", "T511", None, ""),
    "another encoding": (b'{"text": "a"}\n{"text": "\xe9"}', "T512", 2, "iconv"),
    "no JSON": ('{"text": "a"}\n{"text": ', "T513", 2, "one object a line"),
    "a broken list": ('[\n{"text": "a"},\n{"text"}\n]', "T513", 3, "one object a line"),
    "no answer": (json.dumps({"messages": TURNS[:1]}), "T515", 1, "assistant"),
    "no turns": ('{"messages": []}', "T515", 1, "a turn of the user"),
    "an empty question": (
        '{"messages": [{"role": "user", "content": " "}, {"role": "assistant", "content": "a"}]}',
        "T515",
        1,
        "",
    ),
    "an answer that is no text": ('{"instruction": "a", "output": 4}', "T515", 1, ""),
    "an answer that is half a character": (r'{"instruction": "a", "output": "\ud83d"}', "T515", 1, "UTF-8"),
    "a history that is a number": ('{"instruction": "a", "output": "b", "history": 3}', "T515", 1, ""),
    "a role that is a list": ('{"messages": [{"role": [], "content": "a"}]}', "T516", 1, "there are"),
    "an unknown role": ('{"messages": [{"role": "usr", "content": "a"}]}', "T516", 1, "did you mean `user`?"),
    "one who speaks twice": (
        json.dumps({"messages": TURNS * 2 + TURNS[1:]}),
        "T516",
        1,
        "",
    ),
    "an answer first": (json.dumps({"messages": TURNS[1:]}), "T516", 1, ""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_learned_is_refused_by_name_and_line(case: str, tmp_path: Path) -> None:
    content, code, line, hint = REFUSED[case]
    (found,) = refusals(written(tmp_path, content))
    assert (found.code, found.span.line if found.span else None) == (code, line)
    assert hint in found.hint


def test_all_bad_rows_are_told_together_and_the_list_is_bounded(tmp_path: Path) -> None:
    rows = [json.dumps(ALPACA), '{"instruction": "a"}', "{", *['{"instruction": "a"}'] * 30]
    found = refusals(written(tmp_path, "\n".join(rows)))
    assert [(each.code, each.span.line) for each in found[:2] if each.span] == [("T514", 2), ("T513", 3)]
    assert len(found) == MOST_FAULTS + 1
    assert found[-1].message.startswith("12 more rows")


def test_a_missing_file_and_an_unknown_ending_are_refused(tmp_path: Path) -> None:
    assert refusals(tmp_path / "none.jsonl")[0].code == "T510"
    assert refusals(written(tmp_path, "a,b", "table.xls"))[0].code == "T510"
    assert refusals(written(tmp_path, "a", "book.txt"), "alpaca")[0].code == "T514"


# Tokens --------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


TWO_TURNS = {"messages": [*TURNS, {"role": "user", "content": "3 + 3?"}, {"role": "assistant", "content": "6"}]}
NO_MARKS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['role'] == 'assistant' and loop.last %}{{ 'hm. ' }}"
    "{% endif %}{{ m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def data_of(folder: Path, *rows: Any) -> TrainingData:
    return read_training_data(written(folder, "\n".join(json.dumps(row) for row in rows)))


def learned(found: Any) -> list[str]:
    return [text for text, kept in found.summary.first if kept]


def test_answers_alone_are_learned_by_the_marks_of_the_template(tokenizer: Any, tmp_path: Path) -> None:
    found = tokenise(data_of(tmp_path, TWO_TURNS), tokenizer, limit=100)
    assert learned(found) == ["4<|end|>", "6<|end|>"]
    assert found.summary.template == "chat"
    assert found.summary.learned == sum(label != NOT_LEARNED for label in found.labels[0])


def test_answers_are_found_without_marks_also_where_the_last_is_written_otherwise(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", NO_MARKS)
    found = tokenise(data_of(tmp_path, TWO_TURNS), tokenizer, limit=100)
    assert learned(found) == ["4<|end|>", "hm. 6<|end|>"]


def test_turns_that_the_template_does_not_take_are_refused_with_their_line(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + NO_MARKS
    monkeypatch.setattr(tokenizer, "chat_template", refusing)
    rows = data_of(tmp_path, MESSAGES, {"messages": [{"role": "system", "content": "Be brief."}, *TURNS]})
    with pytest.raises(InputRefused, match=r"T518.*no system") as refused:
        tokenise(rows, tokenizer, limit=100)
    assert [each.span.line for each in refused.value.diagnostics if each.span] == [2]


def test_everything_is_learned_where_that_is_asked_for_and_of_text(tokenizer: Any, tmp_path: Path) -> None:
    whole = tokenise(data_of(tmp_path, MESSAGES), tokenizer, limit=100, train_on_prompt=True)
    assert whole.labels == whole.input_ids
    text = tokenise(data_of(tmp_path, {"text": "The fox."}), tokenizer, limit=100)
    assert learned(text) == ["The fox.<|end|>"]


def test_without_a_template_a_warning_says_how_turns_are_joined(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    found = tokenise(data_of(tmp_path, MESSAGES), tokenizer, limit=100)
    assert [note.code for note in found.notes] == ["T520"]
    assert found.summary.first == (("2 + 2?\n", False), ("4<|end|>", True))
    assert tokenise(data_of(tmp_path, MESSAGES), tokenizer, limit=100, template="plain").notes == ()


def test_a_prompt_and_its_completion_are_joined_without_a_word(tokenizer: Any, tmp_path: Path) -> None:
    found = tokenise(data_of(tmp_path, {"prompt": "the quick", "completion": " fox"}), tokenizer, limit=100)
    assert found.summary.first == (("the quick", False), (" fox<|end|>", True))


def test_each_row_is_told_to_who_listens(tokenizer: Any, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with listening(lambda done, total: told.append((done, total))):
        tokenise(data_of(tmp_path, MESSAGES, MESSAGES), tokenizer, limit=100)
    assert told == [(0, 2), (1, 2), (2, 2)]


def test_long_rows_are_refused_or_cut_and_counted(tokenizer: Any, tmp_path: Path) -> None:
    data = data_of(tmp_path, MESSAGES, {"messages": [{"role": "user", "content": "word " * 40}, TURNS[1]]})
    with pytest.raises(InputRefused) as refused:
        tokenise(data, tokenizer, limit=20)
    (found,) = refused.value.diagnostics
    assert (found.code, found.span.line if found.span else None) == ("T517", 2)
    assert "--truncate" in found.hint
    cut = tokenise(data, tokenizer, limit=20, truncate=True).summary
    assert (cut.rows, cut.cut, cut.dropped) == (1, 1, 1)
    with pytest.raises(InputRefused, match="T519"):
        tokenise(data, tokenizer, limit=5, truncate=True)


# Streaming -----------------------------------------------------------------------------------------------------------
def test_streamed_rows_are_those_in_memory_and_their_file_goes(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr("ktc.training.tune.token_rows._BATCH", 2)
    long = {"messages": [{"role": "user", "content": "word " * 40}, TURNS[1]]}
    rows = [MESSAGES, TWO_TURNS, long, {"messages": [TURNS[0], {"role": "assistant", "content": ""}]}] * 2
    path = str(written(tmp_path, "\n".join(json.dumps(row) for row in rows)))
    names = [f"{path}:1.5", "capitals:0.5"]
    kept, streamed = (
        tokenise(read(names), tokenizer, limit=30, truncate=True, seed=1)
        for read in (read_training_data, stream_training_data)
    )
    assert streamed.dataset().to_list() == kept.dataset().to_list()
    assert (streamed.summary, streamed.notes) == (kept.summary, kept.notes)
    assert len(streamed.input_ids) < len(kept.input_ids)
    assert list(temporary.iterdir())
    del streamed
    assert not list(temporary.iterdir())


def test_streamed_rows_are_held_out_one_by_one() -> None:
    data = stream_training_data(["capitals"])
    assert isinstance(data.examples, StreamedExamples)
    sides = [replace(data.examples, share=0.3, seed=2, held_out=held_out) for held_out in (False, True)]
    train, held_out = ([example.line for example in side] for side in sides)
    assert (len(train), len(held_out)) == (len(sides[0]), len(sides[1]))
    assert sorted(train + held_out) == [example.line for example in data.examples]
    assert 0 < len(held_out) < len(train)


def test_faults_of_streamed_rows_are_told_together_before_any_is_learned(tmp_path: Path) -> None:
    path = written(tmp_path, "\n".join([json.dumps(MESSAGES), "{", "3"]))
    with pytest.raises(InputRefused) as refused:
        stream_training_data([str(path)])
    assert [found.code for found in refused.value.diagnostics] == ["T513", "T514"]
