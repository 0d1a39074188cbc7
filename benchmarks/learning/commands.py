"""Commands of ktc as a reader would type them: printed, run, and the adapter's scores and answers read from their JSON.

A command that fails ends the demo with its exit code.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from learning.results import Example, Scores
from learning.world import Task


def ktc(*arguments: object) -> dict[str, Any]:
    """Print and run a command; return its JSON. Its messages go to stderr."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ ktc {shlex.join(words)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "ktc", *words, "--json"], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout)


def evaluate(task: Task, out: Path, adapter: Path, held_out: Path) -> tuple[Scores, Scores, list[Example]]:
    """`ktc eval`: the scores of the base, those of the tuned model, and what both said to each question."""
    how = ("generation", "--metrics", "kt", "--max-new-tokens", 48) if task == "style" else ("mcq",)
    said = adapter / "held-out.jsonl"
    found = ktc(
        "eval", out, "--adapter", adapter, "--data", held_out, "--task", *how, "--batch-size", 32, "--output", said
    )
    examples = _answered(task, _rows(held_out), _rows(said))
    base, tuned = ({line["name"]: line[column] for line in found["metrics"]} for column in ("base", "tuned"))
    if task == "style":
        base["accuracy"] = _same(examples, "before")
        tuned["accuracy"] = _same(examples, "after")
    return base, tuned, examples


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _answered(task: Task, asked: list[dict[str, Any]], said: list[dict[str, Any]]) -> list[Example]:
    if task == "style":
        questions = [row["messages"][0]["content"] for row in asked]
        rows = [(row["reference"], row["base"], row["tuned"]) for row in said]
    else:
        questions = [f"{row['question']} {', '.join(row['options'])}" for row in asked]
        rows = [(row["answer"], row["base"]["text"].strip(), row["tuned"]["text"].strip()) for row in said]
    return [Example(task, question, *row) for question, row in zip(questions, rows, strict=True)]


def _same(examples: list[Example], which: str) -> float:
    """Return the percentage of answers equal to the reference."""
    return 100 * sum(getattr(example, which) == example.wanted for example in examples) / len(examples)


def processor_seconds() -> float:
    """Of this process and of all commands that have ended: what a busy machine does not change."""
    return sum(os.times()[:4])
