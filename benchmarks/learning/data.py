"""The items of both tasks as files: `ktc train` reads one chat a line, `ktc eval` that or questions with options."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from learning.corpus import chat
from learning.world import Item, Task, World, asking, items


def write_data(world: World, folder: Path) -> dict[Task, tuple[Path, Path]]:
    """Write the tuning and the held-out file of each task; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[Task, tuple[Path, Path]] = {}
    for task in get_args(Task):
        tuning, held_out = folder / f"{task}.jsonl", folder / f"{task}-held-out.jsonl"
        _write(tuning, map(tuning_row, items(world, task, held_out=False)))
        _write(held_out, map(held_out_row, items(world, task, held_out=True)))
        files[task] = tuning, held_out
    return files


def tuning_row(item: Item) -> dict[str, Any]:
    question = asking(item.question, item.options) if item.options else item.question
    return {"messages": chat(question, item.answer)}


def held_out_row(item: Item) -> dict[str, Any]:
    """Return the held-out row of an item; a choice has no reason, because only the letter counts."""
    if not item.options:
        return tuning_row(item)
    return {"question": item.question, "options": item.options, "answer": item.letter}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
