"""Rows of preferences: their formats, and their tokens beside those of TRL's own preparation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from built_tokenizers import BUILT
from datasets import Dataset, disable_progress_bars, enable_progress_bars
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.training.trainers.preferences import with_kl_completions
from ktc.training.tune.examples import read_training_data
from ktc.training.tune.tokenised import TokenisedData, tokenise

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] "
    "+ eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
TEXTS = [
    {"prompt": "Say: the capital ", "chosen": "of France", "rejected": "is Paris"},
    {"prompt": "un", "chosen": "happy", "rejected": "<|user|>"},
    {"prompt": "a wave 😀", "chosen": "👍🏽", "rejected": ""},
    {"prompt": "it ends", "chosen": "by itself<|end|>", "rejected": "here"},
]
BEFORE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "how?"},
    {"role": "assistant", "content": "fine"},
    {"role": "user", "content": "and then?"},
]
GOOD, BAD = ({"role": "assistant", "content": content} for content in ("well 😀", "the world"))
CHATS = [
    {"prompt": BEFORE, "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": BEFORE[:2], "chosen": [BAD, BEFORE[3], GOOD], "rejected": [GOOD]},
]
WHOLE = [{"chosen": [*BEFORE, GOOD], "rejected": [*BEFORE, BAD]}]
JUDGED = [
    {"prompt": row["prompt"], "completion": row[key], "label": key == "chosen"}
    for row in TEXTS
    for key in ("chosen", "rejected")
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    disable_progress_bars()
    yield
    enable_progress_bars()


def of_ktc(folder: Path, tokenizer: Any, rows: list[Any], method: Any) -> TokenisedData:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return tokenise(read_training_data(path, method=method), tokenizer, limit=1000)


def of_trl(tokenizer: Any, rows: list[Any], trainer: Any, config: Any) -> list[dict[str, Any]]:
    args = config(output_dir="unused", report_to="none", use_cpu=True, max_length=None, per_device_train_batch_size=3)
    itself = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=True, desirable_weight=1.0, undesirable_weight=1.0)
    return trainer._prepare_dataset(itself, Dataset.from_list(rows), tokenizer, args, "train").to_list()


def tokens(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in row if name.endswith("_ids") or name == "label"} for row in rows]


@pytest.mark.parametrize(
    "name", ["byte-level BPE, trimmed offsets", "SentencePiece BPE, a space before all", "WordPiece"]
)
def test_tokens_of_preferences_are_those_of_trl(name: str, tmp_path: Path) -> None:
    tokenizer = BUILT[name]()
    tokenizer.chat_template = TEMPLATE
    for rows in (TEXTS, CHATS, WHOLE, [{**row, "tools": json.dumps([{"name": "add"}])} for row in CHATS]):
        ours = of_ktc(tmp_path, tokenizer, rows, "dpo").dataset().to_list()
        assert ours == tokens(of_trl(tokenizer, rows, DPOTrainer, DPOConfig))
    for rows in (JUDGED, CHATS):
        ours = of_ktc(tmp_path, tokenizer, rows, "kto").dataset()
        if rows is CHATS:  # TRL puts all good answers first
            ours = ours.sort("label", reverse=True)
        shifted = ours.map(with_kl_completions, batched=True, batch_size=3)
        assert tokens(shifted.to_list()) == tokens(of_trl(tokenizer, rows, KTOTrainer, KTOConfig))


def test_both_answers_of_a_pair_are_counted_and_the_chosen_one_is_shown(tmp_path: Path) -> None:
    tokenizer = BUILT["byte-level BPE"]()
    found = of_ktc(tmp_path, tokenizer, [{"prompt": "un", "chosen": " happy", "rejected": " world"}], "dpo").summary
    assert (found.rows, found.format) == (1, "pairs")
    assert found.learned == sum(len(tokenizer(text)["input_ids"]) for text in (" happy<|end|>", " world<|end|>"))
    assert found.first[-1][0] == " happy<|end|>"


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
FAULTS: Mapping[str, tuple[Any, str, str, str]] = {
    "pairs without a method": (PAIR, "sft", "T514", "`--method dpo`"),
    "judged answers without a method": (
        {"prompt": "a", "completion": "b", "label": False},
        "sft",
        "T514",
        "`--method kto`",
    ),
    "answers with dpo": ({"prompt": "a", "completion": "b"}, "dpo", "T514", "pairs: `chosen`, `rejected`"),
    "answers with kto": ({"prompt": "a", "completion": "b"}, "kto", "T514", "judged: `prompt`"),
    "a judgement in words": ({"prompt": "a", "completion": "b", "label": "good"}, "kto", "T515", "true"),
    "equal answers": ({**PAIR, "rejected": "b"}, "dpo", "T515", ""),
    "a text and a list": ({**PAIR, "chosen": [GOOD]}, "dpo", "T515", ""),
    "texts without a prompt": ({"chosen": "a", "rejected": "b"}, "dpo", "T514", "two whole conversations"),
    "conversations without a prompt": ({"chosen": BEFORE[1:3], "rejected": [BEFORE[3], BAD]}, "dpo", "T515", ""),
    "an answer that is not compared": (
        {"prompt": BEFORE[:2], "chosen": [{**BAD, "weight": 0}, BEFORE[3], GOOD], "rejected": [GOOD]},
        "dpo",
        "T515",
        "`weight`",
    ),
    "a judged answer of weight 0": (
        {"prompt": BEFORE, "completion": [{**GOOD, "weight": 0}], "label": True},
        "kto",
        "T515",
        "`weight`",
    ),
    "no answer": ({"prompt": BEFORE, "chosen": BEFORE[:0], "rejected": [BAD]}, "dpo", "T515", ""),
}


@pytest.mark.parametrize("case", FAULTS)
def test_preferences_that_cannot_be_learned_are_refused(case: str, tmp_path: Path) -> None:
    row, method, code, hint = FAULTS[case]
    (found,) = refusals(tmp_path, row, method)
    assert (found.code, found.span.line if found.span else None) == (code, 1)
    assert hint in found.hint


def refusals(folder: Path, row: Any, method: Any) -> list[Diagnostic]:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(InputRefused) as refused:
        read_training_data(path, method=method)
    return list(refused.value.diagnostics)
