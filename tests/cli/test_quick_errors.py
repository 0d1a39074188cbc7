"""Typical mistakes of every command are answered before a heavy library is imported, so within a second.

Imported modules are counted, not seconds. Each command line runs in a fork of one process.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import typer.main
from places import ROOT

from ktc.cli import app as cli

HEAVY = ("torch", "transformers", "peft", "datasets", "numpy", "huggingface_hub", "fastapi", "trl", "accelerate")

# In a folder with: `full/x`, `bad.yaml`, `bad.ktr`, `empty.jsonl`.
MISTAKES = {
    "check x": "E011",
    "check bad.ktr tiny:qwen3_moe": "E002",
    "check moe-lora nofolder": "I100",
    "check moe-lora full": "I102",
    "check moe-lora tiny:qwen3_mo": "I110",
    "check moe-lora tiny:qwen3_moe --host nofile": "H205",
    "check moe-lora auto": "U008",
    "check moe-lora tiny:qwen3_moe --set a": "U004",
    "check moe-lora tiny:qwen3_moe --for train": "U006",
    "compile": "U001",
    "compile nofolder": "I100",
    "compile qwen3_moe": "I100",
    "compile moe-lora": "U008",
    "compile moe-lora auto": "U008",
    "compile tiny:qwen3_moe tiny:deepseek_v2": "U008",
    "compile tiny:qwen3_moe norules": "E011",
    "compile tiny:qwen3_moe -o a-b": "I140",
    "compile tiny:qwen3_moe -o json": "I141",
    "compile tiny:qwen3_moe -o full": "I142",
    "compile tiny:qwen3_moe -o full/x/made": "I143",
    "compile tiny:qwen3_moe --isa neon": "H211",
    "compile tiny:qwen3_moe --host nofile": "H205",
    "compile tiny:qwen3_moe --set no_such=1": "E028",
    "plan nofolder": "I100",
    "plan tiny:qwen3_moe --host nofile": "H205",
    "plan nofolder --calibrate": "L400",
    "plan tiny:qwen3_moe --host h100 --what-if cuda:7=12GB": "U004",
    "plan tiny:qwen3_moe --host h100 --what-if cuda:0=12GB --what-if cuda:0=24GB": "U004",
    "graph": "U010",
    "graph nofolder": "I100",
    "graph --diff a b": "I100",
    "graph tiny:qwen3_moe --rules x": "E011",
    "train": "U001",
    "train nofolder --data capitals": "L400",
    "train full --data capitals": "L400",
    "train tiny:qwen3_moe": "T504",
    "train tiny:qwen3_moe --data nofile.jsonl": "T510",
    "train tiny:qwen3_moe --data capitals --data empty.jsonl": "T511",
    "train tiny:qwen3_moe --data full/*.csv": "T545",
    "train tiny:qwen3_moe --data capitals --column promt=a": "T503",
    "train tiny:qwen3_moe --data capitals --column prompt=a": "T514",
    "train tiny:qwen3_moe --data capitals --lr 1": "U001",
    "train tiny:qwen3_moe --data capitals --config nofile": "T501",
    "train tiny:qwen3_moe --data capitals --config bad.yaml": "T502",
    "train tiny:qwen3_moe --data capitals --rank 0": "T503",
    "generate nofolder hi": "L400",
    "generate tiny:qwen3_moe": "G700",
    "generate tiny:qwen3_moe hi --prompt hi": "G700",
    "generate tiny:qwen3_moe hi --top-p 0.5": "G707",
    "generate tiny:qwen3_moe hi --adapter nofolder": "A601",
    "generate tiny:qwen3_moe --file nofile": "G705",
    "generate tiny:qwen3_moe --file empty.jsonl": "G702",
    "generate tiny:qwen3_moe --file empty.jsonl -o full": "G702",
    "chat nofolder": "L400",
    "chat tiny:nope": "I110",
    "chat tiny:qwen3_moe --adapter full": "A601",
    "serve nofolder": "L400",
    "serve tiny:qwen3_moe --adapter nofolder": "A601",
    "serve tiny:qwen3_moe --adapter a=nofolder": "A601",
    "serve tiny:qwen3_moe --api-key-file nofile": "U005",
    "eval nofolder --data capitals": "L400",
    "eval nofolder --data capitals --task mcq --metrics kt": "V804",
    "export nofolder": "A601",
    "export full": "A601",
    "export full --gguf": "A603",
    "export full --gguf --check": "Q512",
    "merge a b": "A603",
    "merge tiny:nope b": "I110",
    "merge full b": "A603",
    "quantize tiny:nope": "I110",
    "quantize nofolder": "A603",
    "init nofolder": "I100",
    "init tiny:qwen3_moe --from x": "E011",
    "init tiny:qwen3_moe -o init": "U009",
    "list x": "U001",
    "pack nofolder": "L400",
    "verify nofolder": "L400",
    "prove nofolder": "L400",
    "consistency nofolder": "L400",
    "consistency a a": "V810",
    "fmt nofile": "E011",
    "fmt bad.ktr": "E002",
    "explain E999": "U020",
    "import-kt-yaml nofile tiny:qwen3_moe": "U005",
    "import-kt-yaml bad.yaml nofolder": "I100",
    "lf train nofile": "F903",
    "census a": "U001",
    "doctor --mesure": "U001",
    "bench moe --impl nope": "U030",
    "bench stream --impl nope": "U001",
    "bench attention --model nope": "U030",
    "bench decode --model nofile": "U030",
    "bench finetune --config nofolder": "I100",
    "bench generate --config nofolder": "I100",
    "bench plans --config nofolder": "I100",
    "bench serve nofolder": "L400",
}

_ASK = """
import json, os, shlex, sys
from ktc.cli.app import main
from ktc.language import dsl
answers = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
os.dup2(1, 2)
dsl.load("auto", {})  # builds the parser once for all
main(["explain", "E999"])
for line in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        os.dup2(os.open(f"{os.getpid()}.said", os.O_CREAT | os.O_RDWR), 2)
        code = main(shlex.split(line))
        sys.stderr.flush()
        answers.write(json.dumps([line, [code, open(f"{os.getpid()}.said").read(), sorted(sys.modules)]]) + "\\n")
        answers.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""


def _command(line: str) -> str:
    words = line.split()
    return " ".join(words[:2]) if words[0] in ("bench", "lf") else words[0]


# The last line of each command is a quick test.
QUICK = tuple({_command(line): line for line in MISTAKES}.values())
Answers = Callable[[tuple[str, ...]], dict[str, Any]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The exit code, the messages and the imported modules of each of the lines, which run once."""
    return cache(functools.partial(_answers, tmp_path_factory))


def _answers(tmp_path_factory: pytest.TempPathFactory, lines: tuple[str, ...]) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "full").mkdir()
    (folder / "full" / "x").write_text("")
    (folder / "bad.yaml").write_text("lr: 1\n")
    (folder / "bad.ktr").write_text("rule x {\n")
    (folder / "init").mkdir()
    (folder / "init" / "train.yaml").write_text("")
    (folder / "empty.jsonl").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", _ASK, *lines], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("line", QUICK)
def test_a_mistake_is_answered_before_a_heavy_import(answers: Answers, line: str) -> None:
    _check(line, answers(QUICK))


@pytest.mark.slow
def test_all_mistakes_are_answered_before_a_heavy_import(answers: Answers) -> None:
    answered = answers(tuple(MISTAKES))
    for line in MISTAKES:
        _check(line, answered)


def _check(line: str, answered: dict[str, Any]) -> None:
    code, said, modules = answered[line]
    assert (code, *re.findall(r"^error\[(.*?)\]", said, re.MULTILINE)[:1]) == (2, MISTAKES[line])
    assert [name for name in HEAVY if name in modules] == []


def test_every_command_has_typical_mistakes() -> None:
    def names(prefix: str, command: Any) -> set[str]:
        below = getattr(command, "commands", {})
        return {name for word, one in below.items() for name in names(f"{prefix} {word}".strip(), one)} or {prefix}

    assert names("", typer.main.get_command(cli.app)) <= {*map(_command, MISTAKES)}


def test_names_of_twins_are_read_without_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from ktc.model.hf.model_names import causal_families

    assert causal_families() == frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
