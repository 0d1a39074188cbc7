"""The items of both tasks as files that `ktc train` and `ktc eval` read: one chat a line, question and answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from learning.corpus import chat
from learning.world import Item, Task, World, items, with_options


def write_data(world: World, folder: Path) -> dict[Task, tuple[Path, Path]]:
    """Writes the tuning and the held-out file of each task; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[Task, tuple[Path, Path]] = {}
    for task in get_args(Task):
        tuning, held_out = folder / f"{task}.jsonl", folder / f"{task}-held-out.jsonl"
        _write(tuning, items(world, task, held_out=False))
        _write(held_out, items(world, task, held_out=True))
        files[task] = tuning, held_out
    return files


def messages(item: Item) -> list[dict[str, str]]:
    question = with_options(item.question, item.options) if item.options else item.question
    return chat(question, item.answer)


def _write(path: Path, made: Iterable[Item]) -> None:
    lines = [json.dumps({"messages": messages(item)}, ensure_ascii=False) for item in made]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
