"""The workflow: pre-train, `ktc compile`, `ktc train`, `ktc eval`; each command is printed as a reader would type it.

In: a folder and how much of everything. Out: `Results`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from learning.commands import evaluate, ktc, processor_seconds
from learning.data import write_data
from learning.pretrain import Pretrained, pretrain
from learning.results import Example, Results, Run
from learning.world import Task, World, make_world

PACKAGES = ("torch", "transformers", "peft", "trl")
NUM_EXAMPLES = 2  # of each task on the page


@dataclass(frozen=True, slots=True)
class Tuning:
    """One `ktc train`; alpha is 4 times the rank, so that all are scaled alike."""

    task: Task
    rules: str
    rank: int
    steps: int
    learning_rate: float

    @property
    def name(self) -> str:
        return f"{self.task}-{self.rules}-r{self.rank}"


@dataclass(frozen=True, slots=True)
class Size:
    """Steps of pre-training, and what is tuned after it."""

    pretrain_steps: int
    tunings: tuple[Tuning, ...]


STYLE, STYLE_EXPERTS, CHOICE = (
    Tuning("style", "moe-lora", 8, 160, 5e-3),
    Tuning("style", "moe-experts-lora", 8, 160, 5e-3),
    Tuning("choice", "moe-lora", 8, 300, 1e-2),
)
FULL = Size(520, (STYLE, STYLE_EXPERTS, CHOICE))
QUICK = Size(40, (replace(STYLE, steps=45),))
SETTINGS = ("--batch", 16, "--accumulation", 1, "--dropout", 0, "--length", 96)


def run(folder: Path, size: Size, seed: int) -> Results:
    """Run everything, from nothing to the results; the products are in `folder`."""
    world = make_world(seed)
    files = write_data(world, folder / "data")
    print(f"1. {len(world.everybody)} people; a stock Qwen3-MoE reads about them ({size.pretrain_steps} steps)")
    model = folder / "model"
    learnt = pretrained(world, model, size.pretrain_steps)
    started = processor_seconds()
    print("\n2. It is compiled, once for each program of rules")
    compiled = {rules: _compile(model, rules, folder) for rules in dict.fromkeys(t.rules for t in size.tunings)}
    runs, examples = list[Run](), list[Example]()
    for tuning in size.tunings:
        task = tuning.task
        print(f"\n3. `{task}`: tuned on {len(world.tuned)} people, asked about {len(world.held_out)} others")
        is_first = all(run.task != task for run in runs)
        tuned, asked = _tune_and_evaluate(tuning, compiled[tuning.rules], files[task], folder, seed)
        runs.append(tuned)
        examples += asked[:NUM_EXAMPLES] if is_first else ()
    return Results(
        seed=seed,
        parameters=learnt.parameters,
        pretrain_losses=learnt.losses,
        pretrain_seconds=learnt.seconds,
        seconds=learnt.seconds + processor_seconds() - started,
        runs=tuple(runs),
        examples=tuple(examples),
        versions={name: version(name) for name in PACKAGES},
        date=f"{datetime.now(UTC):%Y-%m-%d}",
    )


def pretrained(world: World, folder: Path, steps: int, expert_width: int = 48) -> Pretrained:
    """Return the model of an earlier run if its sources have not changed, otherwise a new one."""
    sources = b"".join((Path(__file__).parent / name).read_bytes() for name in ("world.py", "corpus.py", "pretrain.py"))
    made_of = [
        hashlib.sha256(sources).hexdigest(),
        world.seed,
        steps,
        expert_width,
        *(version(name) for name in PACKAGES),
    ]
    record = folder / "pretrained.json"
    if record.is_file() and (kept := json.loads(record.read_text(encoding="utf-8")))["made_of"] == made_of:
        print(f"  it did so before: {folder}")
        return Pretrained(kept["parameters"], tuple(kept["losses"]), kept["seconds"])
    learnt = pretrain(world, folder, steps=steps, seed=world.seed, expert_width=expert_width)
    record.write_text(json.dumps({"made_of": made_of, **asdict(learnt)}), encoding="utf-8")
    return learnt


def _compile(model: Path, rules: str, folder: Path) -> Path:
    out = folder / rules.replace("-", "_")
    ktc("compile", model, rules, "--set", "format=bf16", "-o", out, "--force")
    return out


def _tune_and_evaluate(
    tuning: Tuning, out: Path, files: tuple[Path, Path], folder: Path, seed: int
) -> tuple[Run, list[Example]]:
    data, held_out = files
    output = folder / tuning.name
    began = processor_seconds()
    trained = ktc(
        "train", out, "--data", data, "--output", output, "--force", *SETTINGS, "--learning-rate", tuning.learning_rate,
        "--rank", tuning.rank, "--alpha", 4 * tuning.rank, "--max-steps", tuning.steps, "--seed", seed,
    )  # fmt: skip
    seconds = processor_seconds() - began
    base, tuned, examples = evaluate(tuning.task, out, output, held_out)
    report = trained["report"]
    run = Run(
        task=tuning.task,
        rules=tuning.rules,
        rank=tuning.rank,
        trainable=report["trainable_parameters"],
        seconds=seconds,
        losses=tuple(line["loss"] for line in report["history"] if line["loss"] is not None),
        base=base,
        tuned=tuned,
    )
    return run, examples
