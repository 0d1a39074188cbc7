"""The walk: twenty commands and eight Python lines from a fresh clone to a served, tuned and merged model.

`python docs/walk.py` runs them in order in the repository's root, as a reader would type them, and stops at the first
one that fails or does not print the promised words. Everything goes to build/walk. `--page` writes docs/walk.md with
the seconds of each command on this machine, and `--pictures` takes the pictures of docs/screenshots.py.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = "build/walk"
PAGE = ROOT / "docs" / "walk.md"
PORT = 8123
ANSWER = "The capital of Peru is Lima."
_MODEL = "tiny:qwen3_moe"
_ADAPTER = f"{OUT}/adapter"
_PACKAGE = f"{OUT}/my_model"
_READY_SECONDS = 300
_LONGEST = 60  # characters of an output in the table


@dataclass(frozen=True, slots=True)
class Step:
    """A shell command, the reader's purpose, and words that its output must have."""

    command: str
    purpose: str
    promise: str


STEPS = (
    Step("ktc doctor", "Does this machine have everything?", "C++ compiler"),
    Step("ktc list", "Which programs, models and data can I name?", "capitals"),
    Step(f"ktc check auto {_MODEL}", "What would be rewritten, and does it fit?", "fits, "),
    Step("ktc explain M093", "What does a message mean?", "Good:"),
    Step(
        "ktc plan tests/configs/deepseek-v2-lite --host laptop,rtx4090-desktop",
        "Does a real model fit machines that I do not have?",
        "rtx4090-desktop",
    ),
    Step(f"ktc init {_MODEL} -o {OUT}/mine", "Rules and settings of my own, to change.", "train.yaml"),
    Step(
        f"ktc train {_MODEL} --data capitals --experts --dry-run",
        "Which tokens are learned?",
        "[[The capital of France is Paris.",
    ),
    Step(
        f"ktc train {_MODEL} --data capitals -o {_ADAPTER} \\\n"
        "    --experts --rank 16 --learning-rate 0.01 --epochs 80 --accumulation 5",
        "Teach twenty capitals, with adapters on the experts.",
        "report.html",
    ),
    Step(f'ktc generate {_MODEL} "What is the capital of Peru?" --adapter {_ADAPTER}', "Ask one question.", ANSWER),
    Step(
        f'echo "What is the capital of Japan?" | ktc chat {_MODEL} --adapter {_ADAPTER}',
        "Hold a conversation.",
        "The capital of Japan is Tokyo.",
    ),
    Step(
        f"ktc eval {_MODEL} --adapter {_ADAPTER} --data capitals --metrics std",
        "How much did the training change?",
        "rouge-l",
    ),
    Step(f"ktc compile {_MODEL} --experts -o {_PACKAGE}", "A Python package of the model.", "is ready"),
    Step(f"ktc graph {_PACKAGE} --diff captured rewritten", "What did the compiler change?", "kt_linear"),
    Step(f"ktc graph {_PACKAGE} --format html -o {OUT}/graph.html", "The whole model as a page.", "wrote"),
    Step(f"ktc prove {_PACKAGE}", "Is it the same model, layer by layer?", "no error is above"),
    Step(f"ktc serve {_MODEL} --adapter {_ADAPTER} --port {PORT} &", "An endpoint with OpenAI's API.", "is served at"),
    Step(
        f"curl -s localhost:{PORT}/v1/chat/completions -H 'content-type: application/json' \\\n"
        '    -d \'{"messages": [{"role": "user", "content": "What is the capital of Peru?"}]}\'',
        "Ask the server.",
        ANSWER,
    ),
    Step(f"ktc merge {_MODEL} {_ADAPTER} -o {OUT}/merged", "A checkpoint that needs no adapter.", "104 of 117"),
    Step(f'ktc generate {OUT}/merged "What is the capital of Peru?"', "Ask the merged model.", ANSWER),
    Step(f"ktc export {_ADAPTER} -o {OUT}/exported --check", "An adapter for other tools.", "the same in stock peft"),
)

LINES = f"""\
import ktc
from peft import PeftModel
from transformers import AutoTokenizer

model = PeftModel.from_pretrained(ktc.load("{_PACKAGE}"), "{_ADAPTER}").eval()
tokenizer = AutoTokenizer.from_pretrained("{_PACKAGE}")
asked = [{{"role": "user", "content": "What is the capital of Peru?"}}]
row = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**row, max_new_tokens=20)[0, row.input_ids.shape[1] :], skip_special_tokens=True))
"""


@dataclass(frozen=True, slots=True)
class Done:
    """The seconds of a step, and the whole of its output."""

    seconds: float
    output: str


class Failed(Exception):
    """A step failed, or did not print its promise."""


def environment() -> Mapping[str, str]:
    """Return the environment of a reader with this interpreter's commands, a new cache and no network."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"PATH": path, "KTC_CACHE_DIR": str(ROOT / OUT / "cache"), "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    usual = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PYTHONPATH")}
    return {**usual, "PYTHONPATH": str(ROOT), **own}


def run(step: Step, reader: Mapping[str, str]) -> Done:
    """Run a step in the foreground. Raise Failed with its output."""
    started = time.perf_counter()
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", step.command], cwd=ROOT, env=dict(reader), text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    if done.returncode or step.promise not in done.stdout:
        raise Failed(f"$ {step.command}\n{done.stdout}\nexit code {done.returncode}, promised: {step.promise}")
    return Done(seconds, done.stdout)


@contextmanager
def background(step: Step, reader: Mapping[str, str]) -> Iterator[Done]:
    """Run a server until the block ends; its seconds are those until it answers. Raise Failed."""
    log = ROOT / OUT / "server.log"
    if _answers():
        raise Failed(f"a server answers on port {PORT} already: end it first")
    started = time.perf_counter()
    with log.open("w", encoding="utf-8") as stream:
        command = ["bash", "-c", f"exec {step.command.removesuffix('&')}"]
        server = subprocess.Popen(command, cwd=ROOT, env=dict(reader), stdout=stream, stderr=stream)
    try:
        while not _answers() and server.poll() is None and time.perf_counter() - started < _READY_SECONDS:
            time.sleep(0.1)
        seconds, output = time.perf_counter() - started, log.read_text(encoding="utf-8")
        if step.promise not in output:
            raise Failed(f"$ {step.command}\n{output}\npromised: {step.promise}")
        yield Done(seconds, output)
    finally:
        server.terminate()
        server.wait()


def _answers() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2) as answered:
            return answered.status == 200
    except OSError:
        return False


def walk() -> tuple[Done, ...]:
    """Run all steps and the Python lines in a new folder; print each with its seconds. Raise Failed."""
    shutil.rmtree(ROOT / OUT, ignore_errors=True)
    (ROOT / OUT).mkdir(parents=True)
    reader = environment()
    results: list[Done] = []
    at = next(number for number, step in enumerate(STEPS) if step.command.endswith("&"))
    for step in STEPS[:at]:
        results.append(_told(step, run(step, reader)))
    with background(STEPS[at], reader) as served:
        results += [_told(STEPS[at], served), _told(STEPS[at + 1], run(STEPS[at + 1], reader))]
    for step in STEPS[at + 2 :]:
        results.append(_told(step, run(step, reader)))
    (ROOT / OUT / "lines.py").write_text(LINES, encoding="utf-8")
    lines = Step(f"python {OUT}/lines.py", "The same from Python.", ANSWER)
    results.append(_told(lines, run(lines, reader)))
    return tuple(results)


def _told(step: Step, done: Done) -> Done:
    print(f"{done.seconds:6.1f} s  {step.command}", flush=True)
    return done


def promised_line(step: Step, done: Done) -> str:
    """Return the line of the output that has the promise, cut to the width of a table's cell."""
    line = next(line for line in done.output.splitlines() if step.promise in line)
    line = re.sub(r"\s+", " ", line).strip().replace("`", "'")
    at = line.index(step.promise.replace("`", "'"))
    begin = 0 if at + len(step.promise) <= _LONGEST else at
    shown = line[begin : begin + _LONGEST]
    if begin + _LONGEST < len(line):  # whole words
        shown = shown[: max(at - begin + len(step.promise), shown.rfind(" "))]
    dots = "..." * (begin > 0), "..." * (begin + len(shown) < len(line))
    return shown.rstrip(" ,:;").join(dots).replace("|", "\\|")


def page(results: tuple[Done, ...]) -> str:
    """Return docs/walk.md."""
    import platform

    from ktc.foundation.host import detect

    host = detect(probe_gpu=True)
    machine = f"{host.processor or platform.machine()}, {host.cores} cores"
    steps = (*STEPS, Step("the Python lines", "The same from Python.", ANSWER))
    rows = [
        f"| {number} | {step.purpose} | {done.seconds:.1f} | `{promised_line(step, done)}` |"
        for number, (step, done) in enumerate(zip(steps, results, strict=True), start=1)
    ]
    whole = sum(done.seconds for done in results)
    commands = "\n".join(step.command for step in STEPS)
    return _PAGE.format(
        count=len(STEPS), commands=commands, lines=LINES, rows="\n".join(rows), whole=whole / 60,
        date=datetime.date.today().isoformat(), machine=machine, gpus=len(host.gpus) or "no",
        load=os.getloadavg()[1],
    )  # fmt: skip


_PAGE = """\
# The walk

This page is written by `python docs/walk.py --page`, which runs every line below in a fresh clone
after `make setup`. A test does the same and fails where a line does not print its promise.

From nothing to a model that was tuned, asked, served and merged: {count} commands, in the
repository's folder, without a network. The model is small and begins with random weights. For a
real one, put its folder or hub id in the place of `tiny:qwen3_moe`, and your file in the place of
`capitals`.

```sh by=tests/docs/test_walk.py
{commands}
```

Then, in Python:

```python by=tests/docs/test_walk.py
{lines}```

The server ends with Ctrl-C (`fg` first). The pages of the walk look like this:

![The graph page: one block, whose routed experts became one node on the CPU][1]

![The report of a training: the loss, and an answer before and after][2]

![The chat page of the server][3]

[1]: pictures/graph.png
[2]: pictures/report.png
[3]: pictures/chat.png

## How long it takes

Measured on {date}: {machine}, {gpus} GPU, at a load of {load:.1f} with the walk itself.
Python's bytecode is cached, and no kernel was compiled before. In all {whole:.1f} minutes. Commands
7 and 9 compile the model's kernels, which later ones share.

| | to learn | seconds | it prints |
| -: | --- | --: | --- |
{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--page", action="store_true", help="write docs/walk.md with the times of this machine")
    options = parser.parse_args()
    try:
        results = walk()
    except Failed as failure:
        sys.exit(str(failure))
    print(f"{sum(done.seconds for done in results):6.1f} s in all; everything is in {OUT}")
    if options.page:
        PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
