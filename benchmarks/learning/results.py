"""The results of the runs as frozen values, and their file `results.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from learning.world import Task

Scores = dict[str, float]  # in percent, by the metric's name as `ktc eval` gives it


@dataclass(frozen=True, slots=True)
class Run:
    """One tuning of one task. `rules` is the program; `seconds` of processor time is what `ktc train` took."""

    task: Task
    rules: str
    rank: int
    trainable: int
    seconds: float
    losses: tuple[float, ...]
    base: Scores
    tuned: Scores


@dataclass(frozen=True, slots=True)
class Example:
    """A held-out question with its reference and the answers before and after tuning."""

    task: Task
    question: str
    wanted: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Results:
    """All of one `make learn`; `pretrain_losses` has one loss per step; `seconds`, of processor time, are all."""

    seed: int
    parameters: int
    pretrain_losses: tuple[float, ...]
    pretrain_seconds: float
    seconds: float
    runs: tuple[Run, ...]
    examples: tuple[Example, ...]
    versions: dict[str, str]
    date: str

    def of(self, task: Task) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.task == task)


def write(results: Results, path: Path) -> None:
    path.write_text(json.dumps(asdict(results), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: Path) -> Results:
    content = json.loads(path.read_text(encoding="utf-8"))
    content["runs"] = tuple(Run(**{**run, "losses": tuple(run["losses"])}) for run in content["runs"])
    content["examples"] = tuple(Example(**example) for example in content["examples"])
    return Results(**{**content, "pretrain_losses": tuple(content["pretrain_losses"])})
