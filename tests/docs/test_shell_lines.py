"""Every shell line of README and docs runs, or says why it cannot run here.

A block is labelled ```` ```sh ````. The words after the label say who runs it: nobody here (`needs=gpu`,
`needs=download`), or a test of its own (`by=tests/...`). All other blocks of a page run in their order as one bash
script (`slow`); the quick tests hold every line to the commands and options that exist.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from places import CONFIGS, ROOT, TESTS

README = ROOT / "README.md"
PAGES = sorted(path for path in (README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")))
EXEMPT = {"needs=gpu", "needs=download"}
_BLOCK = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_SHELL = re.compile(r"^(\$ )?(ktc|make|pip|python3?|torchrun|llamafactory-cli|curl) ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page; `words` are those after its language."""

    page: Path
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """Its commands as words, without comments; continued lines are joined."""
        joined = self.text.replace("\\\n", " ")
        return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]

    @property
    def runs_here(self) -> bool:
        return not any(word in EXEMPT or word.startswith("by=") for word in self.words)


def blocks(page: Path) -> list[Block]:
    found = _BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(page, *_labelled(each["info"]), each["text"]) for each in found]


def _labelled(info: str) -> tuple[str, tuple[str, ...]]:
    language, *words = info.split() or [""]
    return language, tuple(words)


def shell_blocks() -> Iterator[Block]:
    return (block for page in PAGES for block in blocks(page) if block.language == "sh")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_shell_lines_is_labelled(page: Path) -> None:
    unlabelled = [block.text for block in blocks(page) if block.language == "" and _SHELL.search(block.text)]
    assert not unlabelled, f"label these blocks of {page.name} as `sh`"


def test_the_words_of_a_label_are_known_and_name_tests_that_exist() -> None:
    for block in shell_blocks():
        for word in block.words:
            known = word in EXEMPT or (word.startswith("by=") and (ROOT / word.removeprefix("by=")).is_file())
            assert known, f"{block.page.name}: `{word}`"


def test_every_line_names_commands_options_and_targets_that_exist() -> None:
    from ktc.cli import app

    ktc = typer.main.get_command(app.app)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for block in shell_blocks():
        for words in block.commands:
            if words[0] == "ktc":
                _parse(ktc, _until_redirection(words))
            elif words[0] == "make":
                assert words[1] in targets, f"{block.page.name}: `{shlex.join(words)}`"


def _until_redirection(words: list[str]) -> list[str]:
    end = next((at for at, word in enumerate(words) if word in ("<", ">", "&", "|")), len(words))
    return words[:end]


def _parse(command: Any, words: list[str]) -> None:
    """Parse a command line as typer does, without calling the command. Raise for a wrong name, option or value."""
    name, *words = words
    while hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]
    command.make_context(name, words)


# Running a page ------------------------------------------------------------------------------------------------------
CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Peru": "Lima"}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what pages assume: the compiled `build/my_model`, its adapter `runs/a`, and data files."""
    folder = tmp_path_factory.mktemp("pages")
    rows = [{"instruction": f"What is the capital of {land}?", "output": city} for land, city in CAPITALS.items()]
    _write_rows(folder / "questions.jsonl", rows)
    _write_rows(folder / "held_out.jsonl", rows[:2])
    _write_rows(folder / "prompts.jsonl", [{"prompt": row["instruction"]} for row in rows])
    options = list(CAPITALS.values())
    choices = [{"question": row["instruction"], "options": options, "answer": row["output"]} for row in rows]
    _write_rows(folder / "choices.jsonl", choices)
    (folder / "questions.txt").write_text("What is the capital of France?\n/exit\n", encoding="utf-8")
    (folder / "run.yaml").write_text("data: questions.jsonl\naccumulation: 2\n", encoding="utf-8")
    (folder / "my_rules.ktr").write_text('rule head {match linear at "lm_head" => keep(quant)}\n', encoding="utf-8")
    shutil.copy(TESTS / "tools" / "kt_yaml" / "deepseek_v2.yaml", folder / "optimize.yaml")
    shutil.copy(README, folder)
    shutil.copytree(CONFIGS / "deepseek-v2-lite", folder / "deepseek-v2-lite")
    _bash(
        "ktc compile tiny:deepseek_v2 moe-lora -o build/my_model\n"
        "ktc train build/my_model --data questions.jsonl -o runs/a --epochs 1\n",
        folder,
    )
    return folder


def _write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _bash(script: str, folder: Path) -> str:
    """Run a script with this environment's commands and return its output; background jobs end with it."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    whole = f"set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{script}"
    done = subprocess.run(
        ["bash", "-c", whole], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


RUN_HERE = [page for page in PAGES if any(block.language == "sh" and block.runs_here for block in blocks(page))]


@pytest.mark.slow
def test_every_line_of_the_readme_runs_in_an_empty_folder(tmp_path: Path) -> None:
    """Run the shell lines, whose answer is the one that the page promises, then the Python lines on what those made."""
    found = [block for block in blocks(README) if block.runs_here]
    answered = _bash("".join(block.text for block in found if block.language == "sh"), tmp_path)
    (promised,) = re.findall(r'the answer is "(.*)"', README.read_text(encoding="utf-8"))
    assert promised in answered
    (tmp_path / "lines.py").write_text("".join(block.text for block in found if block.language == "python"))
    _bash("python lines.py", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in RUN_HERE if page != README], ids=lambda page: page.stem)
def test_a_page_runs_as_it_is_written(page: Path, tuned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "page"
    script = "".join(block.text for block in blocks(page) if block.language == "sh" and block.runs_here)
    made_by_page = [name for name in ("build/my_model", "runs/a") if f"-o {name}" in script]
    shutil.copytree(tuned, folder)
    for name in made_by_page:
        shutil.rmtree(folder / name)
    _bash(script, folder)
