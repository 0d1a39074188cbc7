"""Answer a file of prompts: the output has the same rows in the same order, each with an answer.

Input: the rows of a JSONL file. Output: JSONL text with every field of a row, and `generated`, `generated_tokens` and
`finish`. Refused, with all rows together and before generation: prompts that are too long (G703), or that the chat
template rejects (G706).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ktc.foundation.decode import has_lone_surrogate
from ktc.foundation.files import refusing, write_file
from ktc.inference.generate.answers import Pace, answer_all, set_seed
from ktc.inference.generate.language_model import LanguageModel
from ktc.inference.generate.prompts import ADDED, Row, render, render_all, require_fit
from ktc.inference.generate.sampling import Sampling


def answer_rows(
    opened: LanguageModel,
    rows: Sequence[Row],
    sampling: Sampling,
    *,
    system: str = "",
    raw: bool = False,
    batch_size: int = 1,
    progress: Callable[[int], None] | None = None,
) -> tuple[list[dict[str, Any]], Pace]:
    """Return each row with its answer. Raises InputRefused (G702, G703, G706)."""
    prompts = render_all(rows, lambda row: render(opened, row.prompt, system=system, raw=raw, place=row.place))
    require_fit(opened, prompts, sampling.max_new_tokens)
    set_seed(sampling.seed)
    answers, pace = answer_all(opened, prompts, sampling, batch_size, progress)
    answered = [
        {**row.fields, **dict(zip(ADDED, (answer.text, answer.num_tokens, answer.finish), strict=True))}
        for row, answer in zip(rows, answers, strict=True)
    ]
    return answered, pace


def jsonl(rows: Sequence[dict[str, Any]]) -> str:
    """Return one JSON object per line, non-ASCII letters unescaped; a row with a lone surrogate is escaped."""
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    written = (json.dumps(row) if has_lone_surrogate(line) else line for row, line in zip(rows, lines, strict=True))
    return "".join(line + "\n" for line in written)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write all rows atomically. Raises InputRefused (U003)."""
    with refusing(path):
        write_file(path, jsonl(rows))
