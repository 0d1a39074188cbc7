"""The learned tokens beside TRL's own preparation of the same rows, token by token, for every kind of tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from built_tokenizers import BUILT, END
from datasets import Dataset, disable_progress_bars, enable_progress_bars
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from ktc.diagnostics import InputRefused
from ktc.model.hf.token_borders import shared_length
from ktc.training.tune.examples import read_training_data
from ktc.training.tune.tokenised import NOT_LEARNED, TokenisedData, tokenise

Rows = list[tuple[list[int], list[int]]]

PAIRS = [
    ("Say: the capital ", "of"),
    ("Say: the capital", " of"),
    ("", "of France"),
    ("un", "happy"),
    ("  leading", "  trailing  "),
    ("line\n", "\nnext"),
    ("line\r", "\nnext"),
    ("a tab\t", "\tand more\n"),
    ("a wave 😀", "👍🏽"),
    ("a thumb 👍", "🏽 in a tone"),
    ("a family 👨‍", "👩‍👧"),
    ("cafe", "\u0301 au lait"),
    ("日本", "語です"),
    (f"it stops{END}", "here"),
    ("it ends", f"by itself{END}"),
    ("it goes", f"{END} on"),
    ("<s>", "begins twice <s>"),
    ("ﬁ", "ﬁ ligatures"),
    ("nothing follows", ""),
    ("a blank follows", " "),
]
TURN = "{{ '<|' + m['role'] + '|>\n' }}"
SAID = "{{ m['content'] + eos_token }}"
ASK = "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
MARKED = {
    "marks": "{% for m in messages %}" + TURN + "{% if m['role'] == 'assistant' %}{% generation %}" + SAID
    + "{% endgeneration %}{% else %}" + SAID + "{% endif %}{{ '\n' }}{% endfor %}" + ASK,
    "marks without an end": "{% for m in messages %}" + TURN + "{% if m['role'] == 'assistant' %}{%- generation -%}"
    "{{ m['content'] }}{%- endgeneration -%}{% else %}{{ m['content'] }}{% endif %}{{ '\n' }}{% endfor %}" + ASK,
}  # fmt: skip
UNMARKED = {
    "no marks": "{% for m in messages %}" + TURN + SAID + "{{ '\n' }}{% endfor %}" + ASK,
    "words alone": "{% for m in messages %}{{ '### ' + m['role'] + ': ' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant: ' }}{% endif %}",
    "a thought": "{% for m in messages %}" + TURN + SAID + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n<think></think>\n' }}{% endif %}",
}  # fmt: skip
QUICK = ("byte-level BPE, trimmed offsets", "SentencePiece BPE, a space before all", "WordPiece", "words in Python")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    disable_progress_bars()
    yield
    enable_progress_bars()


def of_trl(tokenizer: Any, rows: Sequence[Any], **settings: Any) -> Rows:
    """Return the rows as TRL's trainer prepares them before its first step."""
    chosen = {"max_length": None, **settings}
    args = SFTConfig(output_dir="unused", report_to="none", use_cpu=True, **chosen)
    by_pairs = "prompt" in rows[0] if args.completion_only_loss is None else args.completion_only_loss
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=by_pairs)
    prepare: Any = SFTTrainer._prepare_dataset
    found = prepare(trainer, Dataset.from_list(list(rows)), tokenizer, args, args.packing, None, "train")
    return [(row["input_ids"], row["labels"]) for row in found]


def of_ktc(folder: Path, tokenizer: Any, rows: Sequence[Any], **settings: Any) -> TokenisedData:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return tokenise(read_training_data(path), tokenizer, **{"limit": 10_000, **settings})


def rows_of(found: TokenisedData) -> Rows:
    return list(zip(found.input_ids, found.labels, strict=True))


def learned(found: TokenisedData) -> list[str]:
    return [text for text, kept in found.summary.first if kept]


# Rows in each format -------------------------------------------------------------------------------------------------
def turns(*contents: str) -> list[dict[str, str]]:
    return [
        {"role": ("user", "assistant")[at % 2], "content": content if at % 2 or content.strip() else "?"}
        for at, content in enumerate(contents)
    ]


PROMPTS = [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS]
TEXTS = [{"text": prompt + completion} for prompt, completion in PAIRS]
CHATS = [turns(*pair) for pair in PAIRS]
LONG_CHATS = [turns(*first, *second) for first, second in zip(PAIRS, reversed(PAIRS), strict=True)]


def as_messages(chats: Sequence[Any]) -> list[Any]:
    return [{"messages": chat} for chat in chats]


def as_sharegpt(chats: Sequence[Any]) -> list[Any]:
    names = {"user": "human", "assistant": "gpt"}
    return [{"conversations": [{"from": names[t["role"]], "value": t["content"]} for t in chat]} for chat in chats]


def as_alpaca(chats: Sequence[Any]) -> list[Any]:
    """Return the last question and answer, after a history."""
    found = list[Any]()
    for chat in chats:
        *before, question, answer = [turn["content"] for turn in chat]
        history = [list(pair) for pair in zip(before[::2], before[1::2], strict=True)]
        found.append({"instruction": question, "output": answer, "history": history})
    return found


# Comparisons ---------------------------------------------------------------------------------------------------------
def by_turns(tokenizer: Any, chats: Sequence[Any]) -> Rows:
    """Return TRL's labels of each answer after its prompt, added up over the turns of a conversation."""
    asked = [{"prompt": chat[:at], "completion": chat[at : at + 1]} for chat in chats for at in range(1, len(chat), 2)]
    each, found = iter(of_trl(tokenizer, asked)), Rows()
    for chat in chats:
        *earlier, (ids, labels) = [next(each) for _ in range(1, len(chat), 2)]
        for own, own_labels in earlier:
            until = shared_length(own, ids)
            until += until < len(own)  # a token that holds the answer's end and more
            begin = next(at for at, label in enumerate(own_labels) if label != NOT_LEARNED)
            labels[begin:until] = ids[begin:until]
        found.append((ids, labels))
    return found


def joined_plainly(chats: Sequence[Any]) -> list[Any]:
    """Conversations of one answer as `--template plain` writes them."""
    return [{"prompt": f"{question['content']}\n", "completion": answer["content"]} for question, answer in chats]


def transformers_knows(tokenizer: Any, chat: Any) -> bool:
    """Return whether each marked stretch begins in a token, and its last character is in one token and no other."""
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    inside = [sum(first <= at < end for first, end in places) for at in range(len(text))]
    at = 0
    for turn in chat:
        marked = turn["content"] + (END if "+ eos_token" in tokenizer.chat_template else "")
        at = text.index(f"<|{turn['role']}|>\n{turn['content']}", at) + len(f"<|{turn['role']}|>\n")
        if turn["role"] == "assistant" and not (marked.strip() and inside[at] and inside[at + len(marked) - 1] == 1):
            return False
    return True


def with_loss(rows: Rows) -> Rows:
    """Return the rows that ktc keeps: a label at the first token has no loss."""
    return [row for row in rows if any(label != NOT_LEARNED for label in row[1][1:])]


def cells(folder: Path, tokenizer: Any) -> Iterator[tuple[str, Rows, Rows]]:
    """Yield each comparison of one tokenizer: its name, ktc's rows and TRL's."""

    def ktc(rows: Sequence[Any], **settings: Any) -> Rows:
        return rows_of(of_ktc(folder, tokenizer, rows, **settings))

    tokenizer.chat_template = None
    yield "prompt", ktc(PROMPTS), with_loss(of_trl(tokenizer, PROMPTS))
    yield "text", ktc(TEXTS), of_trl(tokenizer, TEXTS)
    yield "plain", ktc(as_messages(CHATS), template="plain"), of_trl(tokenizer, joined_plainly(CHATS))
    yield "all", ktc(PROMPTS, train_on_prompt=True), of_trl(tokenizer, PROMPTS, completion_only_loss=False)
    yield "cut", ktc(PROMPTS, limit=9, truncate=True), with_loss(of_trl(tokenizer, PROMPTS, max_length=9))
    for strategy in ("bfd", "wrapped"):
        packed = {"packing": True, "max_length": 48, "packing_strategy": strategy}
        answered = [row for row in PROMPTS if row["completion"].strip()]  # TRL packs rows without a loss too
        own = of_ktc(folder, tokenizer, answered, limit=48, truncate=True).dataset().to_list()
        yield strategy, of_trl(tokenizer, own, **packed), of_trl(tokenizer, answered, **packed)
    for name, template in UNMARKED.items():
        tokenizer.chat_template = template
        asked = [{"prompt": chat[:1], "completion": chat[1:]} for chat in CHATS]
        yield name, ktc(as_messages(CHATS)), with_loss(of_trl(tokenizer, asked))
        long = [chat for chat in LONG_CHATS if all(turn["content"].strip() for turn in chat)]
        yield f"{name}, turns", ktc(as_sharegpt(long)), by_turns(tokenizer, long)
    for name, template in MARKED.items():
        tokenizer.chat_template = template
        if not tokenizer.is_fast:  # transformers refuses
            continue
        chats = [chat for chat in (*CHATS, *LONG_CHATS) if transformers_knows(tokenizer, chat)]
        trl = of_trl(tokenizer, as_messages(chats), assistant_only_loss=True)
        for form in (as_messages, as_sharegpt, as_alpaca):
            yield f"{name}, {form.__name__[3:]}", ktc(form(chats)), trl


def table(folder: Path, names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the rows that are equal of all, by tokenizer and comparison, and a line for each that is not."""
    lines, faults = list[str](), list[str]()
    for name in names:
        tokenizer = BUILT[name]()
        shown = list[str]()
        for cell, ktc, trl in cells(folder, tokenizer):
            assert len(ktc) == len(trl), (name, cell)
            unequal = [(mine, theirs) for mine, theirs in zip(ktc, trl, strict=True) if mine != theirs]
            faults += [f"{name}, {cell}: {marked(tokenizer, a)} instead of {marked(tokenizer, b)}" for a, b in unequal]
            shown.append(f"{cell} {len(ktc) - len(unequal)}/{len(ktc)}")
        lines.append(f"{name}\n    " + "  ".join(shown))
    return "\n".join(lines), faults


def marked(tokenizer: Any, row: tuple[list[int], list[int]]) -> str:
    tokens = zip(tokenizer.convert_ids_to_tokens(row[0]), row[1], strict=True)
    return " ".join(f"[{token}]" if label != NOT_LEARNED else str(token) for token, label in tokens)


@pytest.mark.slow
def test_labels_are_those_of_trl_for_every_tokenizer_format_template_and_packing(tmp_path: Path) -> None:
    shown, faults = table(tmp_path, list(BUILT))
    print(shown)
    assert not faults, "\n".join(faults)


def test_labels_of_prompts_are_those_of_trl(tmp_path: Path) -> None:
    for name in QUICK:
        tokenizer = BUILT[name]()
        assert rows_of(of_ktc(tmp_path, tokenizer, PROMPTS)) == of_trl(tokenizer, PROMPTS), name


# Where transformers' own mask is wrong, or there is none -------------------------------------------------------------
UNKNOWN = [
    ("byte-level BPE", "fine 🙂"),
    ("byte-level BPE", "日"),
    ("byte-level BPE, trimmed offsets", " fine  "),
    ("Llama 2's BPE", "fine 🙂"),
]


@pytest.mark.parametrize(("name", "answer"), UNKNOWN)
def test_marked_answers_are_learned_whole_where_a_character_has_several_tokens_or_none(
    name: str, answer: str, tmp_path: Path
) -> None:
    tokenizer = BUILT[name]()
    tokenizer.chat_template = MARKED["marks without an end"]
    chat = turns("how?", answer, "and then?", answer)
    assert not transformers_knows(tokenizer, chat)
    assert learned(of_ktc(tmp_path, tokenizer, as_messages([chat]))) == [answer, answer]


def test_a_tokenizer_in_python_learns_what_a_template_marks(tmp_path: Path) -> None:
    tokenizer = BUILT["words in Python"]()
    tokenizer.chat_template = MARKED["marks"]
    found = of_ktc(tmp_path, tokenizer, as_messages([turns("how?", "fine", "and then?", "well")]))
    assert learned(found) == [f"fine{END}", f"well{END}"]


def test_turns_without_a_template_are_learned_one_by_one(tmp_path: Path) -> None:
    for name, build in BUILT.items():
        tokenizer = build()
        found = of_ktc(tmp_path, tokenizer, as_messages([turns("how?", "fine", "so?", "well")]), template="plain")
        end = str(tokenizer.eos_token)
        after = [END] if name.endswith("an end after all") else []
        closing = ["[SEP]"] if name == "WordPiece" else after
        wanted = [f"fine{end}", f"well{end}{''.join(closing)}"]
        assert [text.replace(" ", "") for text in learned(found)] == wanted, name
        assert rows_of(found)[0][0] == tokenizer(f"how?\nfine{end}so?\nwell{end}")["input_ids"], name


# A border inside a token ---------------------------------------------------------------------------------------------
def test_a_border_inside_a_token_is_told_once_with_its_row_and_a_hint_that_helps(tmp_path: Path) -> None:
    tokenizer = BUILT["byte-level BPE"]()
    good, joined = {"prompt": "Say: the capital", "completion": " of"}, {"prompt": "the capital ", "completion": "of"}
    found = of_ktc(tmp_path, tokenizer, [good] + [joined] * 100)
    (note,) = found.notes
    assert (note.code, note.severity, note.span and note.span.line) == ("T543", "warning", 2)
    assert "` of`" in note.message
    assert "100 rows" in note.message
    assert "white space" in note.hint
    assert found.summary.first == (("Say: the capital", False), (f" of{END}", True))
    moved = {"prompt": "the capital", "completion": " of"}
    assert of_ktc(tmp_path, tokenizer, [moved]).notes == ()


def test_a_border_that_no_space_can_mend_is_told_without_that_advice(tmp_path: Path) -> None:
    tokenizer = BUILT["byte-level BPE"]()
    (note,) = of_ktc(tmp_path, tokenizer, [{"prompt": "un", "completion": "happy"}]).notes
    assert "rows" not in note.message
    assert "white space" not in note.hint
    tokenizer.chat_template = UNMARKED["a thought"]
    (note,) = of_ktc(tmp_path, tokenizer, as_messages([turns("how?", "fine")])).notes
    assert r"the template ends the prompt alone with `<think></think>\n`" in note.message


def test_a_template_that_rewrites_the_question_once_it_is_answered_is_refused(tmp_path: Path) -> None:
    """TRL learns the question from there on."""
    tokenizer = BUILT["byte-level BPE"]()
    tokenizer.chat_template = "{% if messages | length > 1 %}{{ 'Answered. ' }}{% endif %}" + UNMARKED["no marks"]
    with pytest.raises(InputRefused, match=r"T518.*before turn 2"):
        of_ktc(tmp_path, tokenizer, as_messages([turns("how?", "fine")]))


def test_special_tokens_at_the_end_of_every_text_are_no_border(tmp_path: Path) -> None:
    for name in ("WordPiece", "SentencePiece BPE, an end after all", "bytes in Python"):
        found = of_ktc(tmp_path, BUILT[name](), [{"prompt": "the capital", "completion": "\nof"}])
        assert found.notes == (), name


# Prompts of messages, and tools --------------------------------------------------------------------------------------
SYSTEM = {"role": "system", "content": "Be brief."}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
CALLED = [
    SYSTEM,
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "name": "add", "content": "4"},
    {"role": "assistant", "content": "It is 4 😀"},
]
WITH_TOOLS = (
    "{% if tools %}{{ '<|tools|>' + tools | tojson + '\n' }}{% endif %}{% for m in messages %}" + TURN + "BEGIN"
    "{{ m['content'] }}{% for call in m['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}"
    "{{ eos_token }}END{{ '\n' }}{% endfor %}" + ASK
)
TOOLS_UNMARKED = WITH_TOOLS.replace("BEGIN", "").replace("END", "")
TOOLS_MARKED = WITH_TOOLS.replace("BEGIN", "{% if m['role'] == 'assistant' %}{% generation %}").replace(
    "{{ eos_token }}END",
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] + eos_token }}{% endif %}",
)


@pytest.mark.parametrize("template", [UNMARKED["a thought"], MARKED["marks"]], ids=["no marks", "marks"])
def test_of_a_prompt_of_messages_the_completion_is_learned_as_by_trl(template: str, tmp_path: Path) -> None:
    chats = [[SYSTEM, *chat] for chat in LONG_CHATS if all(turn["content"].strip() for turn in chat)]
    rows = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in chats]
    for name in QUICK:
        tokenizer = BUILT[name]()
        tokenizer.chat_template = template
        assert rows_of(of_ktc(tmp_path, tokenizer, rows)) == of_trl(tokenizer, rows), name


@pytest.mark.parametrize("template", [TOOLS_UNMARKED, TOOLS_MARKED], ids=["no marks", "marks"])
def test_of_calls_of_tools_the_assistants_tokens_are_learned_as_by_trl(template: str, tmp_path: Path) -> None:
    told = json.dumps([ADD])
    pairs = [{"prompt": CALLED[:at], "completion": CALLED[at:end], "tools": told} for at, end in ((2, 3), (4, 5))]
    for name in ("byte-level BPE", "letters"):
        tokenizer = BUILT[name]()
        tokenizer.chat_template = template
        assert rows_of(of_ktc(tmp_path, tokenizer, pairs)) == of_trl(tokenizer, pairs), name
        whole = of_ktc(tmp_path, tokenizer, [{"messages": CALLED, "tools": [ADD]}])
        if template == TOOLS_MARKED:
            assert rows_of(whole) == of_trl(tokenizer, [{"messages": CALLED, "tools": told}], assistant_only_loss=True)
        called, said = learned(whole)
        if name != "letters":  # it does not know all of them
            assert called.startswith(json.dumps(CALL["function"]) * 2 + END)
            assert said.startswith(f"It is 4 😀{END}")


def test_calls_of_sharegpt_and_of_openai_are_those_of_messages(tmp_path: Path) -> None:
    tokenizer = BUILT["byte-level BPE"]()
    tokenizer.chat_template = TOOLS_UNMARKED
    texts = {"user": "human", "assistant": "gpt", "tool": "observation", "system": "system"}
    said = [{"from": texts[turn["role"]], "value": turn["content"]} for turn in CALLED]
    said[2] = {"from": "function_call", "value": json.dumps([CALL["function"]] * 2)}
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}] * 2
    openai = [*CALLED[:2], {"role": "assistant", "content": None, "tool_calls": calls}, *CALLED[3:]]
    openai[3] = {**CALLED[3], "tool_call_id": "1"}
    plain = rows_of(of_ktc(tmp_path, tokenizer, [{"messages": CALLED, "tools": [ADD]}]))
    assert rows_of(of_ktc(tmp_path, tokenizer, [{"conversations": said, "tools": json.dumps([ADD])}])) == plain
    rows = rows_of(of_ktc(tmp_path, tokenizer, [{"messages": openai, "tools": [ADD]}]))
    assert rows == plain


def test_an_answer_of_weight_zero_is_not_learned(tmp_path: Path) -> None:
    tokenizer = BUILT["byte-level BPE"]()
    chat = turns("how?", "fine", "and then?", "well")
    for template, end in ((MARKED["marks"], ""), (UNMARKED["no marks"], "\n"), (None, "")):
        tokenizer.chat_template = template
        both = of_ktc(tmp_path, tokenizer, as_messages([chat]))
        weighed = of_ktc(tmp_path, tokenizer, as_messages([[chat[0], {**chat[1], "weight": 0}, *chat[2:]]]))
        assert weighed.input_ids == both.input_ids
        assert learned(weighed) == [f"well{END}{end}"]


def test_a_template_that_leaves_tools_out_is_refused_or_named(tmp_path: Path) -> None:
    tokenizer = BUILT["byte-level BPE"]()
    tokenizer.chat_template = UNMARKED["no marks"]
    found = of_ktc(tmp_path, tokenizer, [{"messages": turns("how?", "fine"), "tools": [ADD]}])
    assert [note.code for note in found.notes] == ["T547"]
    for template, reason in ((UNMARKED["no marks"], "`tool_calls`"), (None, "has no chat template")):
        tokenizer.chat_template = template
        with pytest.raises(InputRefused, match="T518") as refused:
            of_ktc(tmp_path, tokenizer, [{"messages": CALLED}])
        assert reason in refused.value.diagnostics[0].message
