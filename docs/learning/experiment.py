"""The workflow: pre-train, `ktc compile`, `ktc train`, ask; each command is printed as a reader would type it.

In: a folder and how much of everything. Out: `Results`. A command that fails ends the demo with its exit code.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from learning.asking import ask
from learning.data import write_data
from learning.pretrain import Pretrained, pretrain
from learning.results import Example, Results, Run
from learning.world import Task, World, make_world

PACKAGES = ("torch", "transformers", "peft", "trl")
NUM_EXAMPLES = 2  # of each task on the page


@dataclass(frozen=True, slots=True)
class Adapter:
    """What is adapted and how strongly; alpha is 4 times the rank, so that all are scaled alike."""

    rules: str
    rank: int

    @property
    def name(self) -> str:
        return f"{self.rules}-r{self.rank}"


# Attention alone; the experts too with as many trainable parameters; the experts too at the same rank.
ADAPTERS = (Adapter("moe-lora", 8), Adapter("moe-experts-lora", 1), Adapter("moe-experts-lora", 8))
TUNING = ("--batch", 16, "--accumulation", 1, "--learning-rate", 5e-3, "--dropout", 0, "--length", 96)


@dataclass(frozen=True, slots=True)
class Size:
    """Steps of pre-training and of each tuning, and which adapters are tuned."""

    pretrain_steps: int
    tuning_steps: dict[Task, int]
    adapters: tuple[Adapter, ...] = ADAPTERS


FULL = Size(700, {"style": 160, "choice": 100})
QUICK = Size(30, {"style": 30}, ADAPTERS[:1])


def run(folder: Path, size: Size, seed: int) -> Results:
    """Everything, from nothing to the results; what is made lies in `folder`."""
    started = processor_seconds()
    world = make_world(seed)
    files = write_data(world, folder / "data")
    print(f"1. {len(world.everybody)} people; a stock Qwen3-MoE reads about them ({size.pretrain_steps} steps)")
    model = folder / "model"
    learnt = _pretrained(world, model, size.pretrain_steps)
    print("\n2. It is compiled, once for each program of rules")
    compiled = {rules: _compile(model, rules, folder) for rules in dict.fromkeys(a.rules for a in size.adapters)}
    runs, examples = list[Run](), list[Example]()
    for task in size.tuning_steps:
        print(f"\n3. `{task}`: tuned on {len(world.tuned)} people, asked about {len(world.held_out)} others")
        for adapter in size.adapters:
            tuned, asked = _tune_and_ask(task, adapter, compiled[adapter.rules], files[task], folder, size, seed)
            runs.append(tuned)
            examples += asked[:NUM_EXAMPLES] if adapter == size.adapters[0] else ()
    return Results(
        seed=seed,
        parameters=learnt.parameters,
        pretrain_losses=learnt.losses,
        seconds=processor_seconds() - started,
        runs=tuple(runs),
        examples=tuple(examples),
        versions={name: version(name) for name in PACKAGES},
        date=f"{datetime.now(UTC):%Y-%m-%d}",
    )


def _pretrained(world: World, folder: Path, steps: int) -> Pretrained:
    """The model of an earlier run where nothing that makes it has changed, else a new one."""
    sources = b"".join((Path(__file__).parent / name).read_bytes() for name in ("world.py", "corpus.py", "pretrain.py"))
    made_of = [hashlib.sha256(sources).hexdigest(), world.seed, steps, *(version(name) for name in PACKAGES)]
    record = folder / "pretrained.json"
    if record.is_file() and (kept := json.loads(record.read_text(encoding="utf-8")))["made_of"] == made_of:
        print(f"  it did so before: {folder}")
        return Pretrained(kept["parameters"], tuple(kept["losses"]))
    learnt = pretrain(world, folder, steps=steps, seed=world.seed)
    record.write_text(json.dumps({"made_of": made_of, **asdict(learnt)}), encoding="utf-8")
    return learnt


def _compile(model: Path, rules: str, folder: Path) -> Path:
    out = folder / rules.replace("-", "_")
    ktc("compile", model, rules, "-o", out, "--force")
    return out


def _tune_and_ask(
    task: Task, adapter: Adapter, out: Path, files: tuple[Path, Path], folder: Path, size: Size, seed: int
) -> tuple[Run, list[Example]]:
    tuning, held_out = files
    output = folder / f"{task}-{adapter.name}"
    began = processor_seconds()
    trained = ktc(
        "train", out, "--data", tuning, "--output", output, "--force", *TUNING,
        "--rank", adapter.rank, "--alpha", 4 * adapter.rank, "--max-steps", size.tuning_steps[task], "--seed", seed,
    )  # fmt: skip
    seconds = processor_seconds() - began
    asked = ask(out, output, held_out)
    report = trained["report"]
    run = Run(
        task=task,
        rules=adapter.rules,
        rank=adapter.rank,
        trainable=report["trainable_parameters"],
        seconds=seconds,
        losses=tuple(line["loss"] for line in report["history"] if line["loss"] is not None),
        base=asked.base,
        tuned=asked.tuned,
    )
    rows = zip(asked.questions, asked.wanted, asked.before, asked.after, strict=True)
    return run, [Example(task, *row) for row in rows]


def processor_seconds() -> float:
    """Of this process and of all commands that have ended: what a busy machine does not change."""
    return sum(os.times()[:4])


def ktc(*arguments: object) -> dict[str, Any]:
    """Prints and runs a command; returns its JSON. What it tells people goes on to stderr."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ ktc {shlex.join(words)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "ktc", *words, "--json"], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout)
