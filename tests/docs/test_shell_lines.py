"""Every shell and Python block of README and docs runs, or says why it cannot run here.

A block is labelled ```` ```sh ```` or ```` ```python ````. The words after the label say who runs it: nobody here
(`needs=gpu`, `needs=download`, `part` of a program), or a test of its own (`by=tests/...`). All other blocks of a page
run in their order as one bash script (`slow`), pages of the guide in the folder that its first page leaves. The quick
tests hold every line to the commands and options that exist, and every Python block to the language. The numbers of a
block ```` ```text printed ```` are those of the page's output.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import typer
from pages import DOCS, EXEMPT, GUIDE, PAGES, PRINTED, README, Block, blocks, title
from places import CONFIGS, ROOT, TESTS
from pyarrow import parquet

_SHELL = re.compile(r"^(\$ )?(ktc|make|pip|python3?|torchrun|llamafactory-cli|curl) ", re.MULTILINE)
_NUMBER = re.compile(r"\d[\d,.]*\d|\d")
_FIRST = DOCS / "guide" / "first-model.md"


def shell_blocks() -> Iterator[Block]:
    return (block for page in PAGES for block in blocks(page, "sh"))


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_every_block_of_shell_lines_is_labelled(page: Path) -> None:
    unlabelled = [block.text for block in blocks(page) if block.language == "" and _SHELL.search(block.text)]
    assert not unlabelled, f"label these blocks of {page.name} as `sh`"


def test_the_words_of_a_label_are_known_and_name_tests_that_exist() -> None:
    for block in (block for page in PAGES for block in blocks(page, "sh", "python")):
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


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_every_python_block_is_python(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block.text, str(page), "exec")


def test_the_guide_has_no_part_of_a_program() -> None:
    assert not [block.text for page in GUIDE for block in blocks(page) if "part" in block.words]


# Running a page ------------------------------------------------------------------------------------------------------
CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Peru": "Lima"}


@pytest.fixture(scope="module")
def after_first_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that pages assume: `build/my_model` and `runs/a` of the guide's first page, and data files."""
    folder = tmp_path_factory.mktemp("pages")
    rows = [{"instruction": f"What is the capital of {land}?", "output": city} for land, city in CAPITALS.items()]
    _write_rows(folder / "questions.jsonl", rows)
    _write_rows(folder / "held_out.jsonl", rows[:2])
    _write_rows(folder / "prompts.jsonl", [{"prompt": row["instruction"]} for row in rows])
    _write_rows(folder / "chats.jsonl", [{"messages": _turns(**row)} for row in rows])
    texts = pyarrow.Table.from_pylist([{"text": f"{land} has a capital."} for land in CAPITALS])
    (folder / "corpus").mkdir()
    parquet.write_table(texts, folder / "corpus" / "texts.parquet")
    pairs = [{"prompt": row["instruction"], "chosen": row["output"], "rejected": "No idea."} for row in rows]
    _write_rows(folder / "pairs.jsonl", pairs)
    options = list(CAPITALS.values())
    choices = [{"question": row["instruction"], "options": options, "answer": row["output"]} for row in rows]
    _write_rows(folder / "choices.jsonl", choices)
    (folder / "tables").mkdir()
    with (folder / "tables" / "answers.csv").open("w", newline="", encoding="utf-8") as table:
        csv.writer(table).writerows([("instruction", "output"), *CAPITALS.items()])
    (folder / "conversation.txt").write_text("What is the capital of France?\n/exit\n", encoding="utf-8")
    (folder / "run.yaml").write_text("data: questions.jsonl\naccumulation: 2\n", encoding="utf-8")
    shutil.copy(TESTS / "tools" / "kt_yaml" / "deepseek_v2.yaml", folder / "optimize.yaml")
    shutil.copy(README, folder)
    shutil.copytree(CONFIGS / "deepseek-v2-lite", folder / "deepseek-v2-lite")
    shutil.copytree(CONFIGS / "deepseek-v3", folder / "deepseek-ai" / "DeepSeek-V3")  # as the hub's id is written
    _bash(script(_FIRST), folder)
    return folder


def _turns(instruction: str, output: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": instruction}, {"role": "assistant", "content": output}]


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def script(page: Path) -> str:
    """The blocks of a page that run here, in their order, as one bash script."""
    ran = [block for block in blocks(page, "sh", "python") if block.runs_here]
    return "".join(block.text if block.language == "sh" else _here_document(block) for block in ran)


def _here_document(block: Block) -> str:
    return f"python - <<'END OF BLOCK'\n{block.text}END OF BLOCK\n"


def _bash(lines: str, folder: Path) -> str:
    """Run a script with this environment's commands and return its output; background jobs end with it."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    whole = f"set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{lines}"
    done = subprocess.run(
        ["bash", "-c", whole], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{lines}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


RUN_HERE = [page for page in PAGES if page not in (README, _FIRST) and script(page)]


@pytest.mark.slow
def test_every_line_of_the_readme_runs_in_an_empty_folder(tmp_path: Path) -> None:
    answered = _bash(script(README), tmp_path)
    (promised,) = re.findall(r'the answer is "(.*)"', README.read_text(encoding="utf-8"))
    assert promised in answered


@pytest.mark.slow
def test_the_first_page_of_the_guide_ends_with_its_answer(after_first_page: Path) -> None:
    (promised,) = re.findall(r'It answers "(.*)"', _FIRST.read_text(encoding="utf-8"))
    asked = 'ktc generate build/my_model "What is the capital of Peru?" --adapter runs/a\n'
    assert promised in _bash(asked, after_first_page)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_HERE, ids=title)
def test_a_page_runs_as_it_is_written(page: Path, after_first_page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "page"
    shutil.copytree(after_first_page, folder)
    lines = script(page)
    for name in ("build/my_model", "runs/a"):
        if f"-o {name}" in lines:
            shutil.rmtree(folder / name)
    printed = _bash(lines, folder)
    promised = (block.text for block in blocks(page, "text") if PRINTED in block.words)
    numbers = set(_NUMBER.findall(printed))
    missing = [number for text in promised for number in _NUMBER.findall(text) if number not in numbers]
    assert not missing, f"the page shows numbers that its commands do not print:\n{printed}"
