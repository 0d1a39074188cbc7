"""Several processes at once: two of the same command on one place, and a run of torchrun of which one is killed.

    python -m reliability.processes [NAME ...] [--kills 10] [--signals 2] [--jobs 4] [--seed N] [--work FOLDER]

(with tests and tests/support on the path). Of two equal commands at least one succeeds, the other one too or with one
refusal, and what they made is whole. After SIGKILL to any process of a run of torchrun the others end within a minute,
each checkpoint is whole, and `--resume auto` brings the run to its end; so do they after SIGINT or SIGTERM to torchrun,
which sends it on. Exit code 1 where a promise was broken.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Final

import psutil

from ktc.training.trainers.checkpoints import checkpoints
from reliability.commands import COMMANDS, Command, prepare
from reliability.promises import Expected, sizes, unfinished, whole

KTC: Final = (sys.executable, "-m", "ktc")
TORCHRUN: Final = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PATIENCE: Final = 60.0  # seconds for the others to end after one was killed
RUN: Final = (
    "train {place}/tuned --data {root}/facts.jsonl -o {place}/run --max-steps 8 --save-steps 1 --save-total-limit 3 "
    "--length 64 --accumulation 1 --learning-rate 0.01 -q"
)


def started(command: Sequence[str], log: Path, work: Path) -> subprocess.Popen[bytes]:
    """Start a command with one thread, its temporary files and caches below `work`, and its output in `log`."""
    (work / "tmp").mkdir(parents=True, exist_ok=True)
    own = {"KTC_CACHE_DIR": str(work / "cache"), "TMPDIR": str(work / "tmp"), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **own}, cwd=work)


def two_at_once(command: Command, root: Path, work: Path) -> tuple[str, list[str]]:
    """Run a command twice at the same time. Return how they ended, and the promises that were broken."""
    place, logs = work / "place", [work / "first.log", work / "second.log"]
    command.copy_needs(root, place)
    alone = started([*KTC, *command.arguments(root, place)], logs[0], work).wait(600)
    if alone != 0:
        return "", [f"alone it ends with {alone}: {logs[0].read_text()[-300:]}"]
    expected = sizes(place, command.made)
    command.copy_needs(root, place)
    before = sizes(place, command.made)
    both = [started([*KTC, *command.arguments(root, place)], log, work) for log in logs]
    codes = sorted(each.wait(600) for each in both)
    broken: list[str] = []
    if codes[0] != 0 or codes[1] not in (0, 2, 3):
        broken.append(f"they end with {codes}")
    for log in logs:
        said = log.read_text(errors="replace")
        if "Traceback" in said or "U099" in said or len(re.findall(r"^error\[\w+\]", said, re.MULTILINE)) > 1:
            broken.append(f"not one message: {said.strip()[-400:]}")
    torn = whole(sizes(place, command.made), Expected(before, expected), command.made, place)
    left = unfinished(place)
    broken += [each for each in (torn, f"left unfinished: {left}" if left else "") if each]
    return " and ".join(map(str, codes)), broken


def whole_run(root: Path, work: Path) -> float:
    """Run torchrun to its end. Return the seconds that it took."""
    begun = time.monotonic()
    agent, _, log = _torchrun(root, work)
    code = agent.wait(600)
    assert code == 0, f"without a kill it ends with {code}: {log.read_text()[-400:]}"
    return time.monotonic() - begun


def ended_run(how: str, seconds: float, chance: Random, root: Path, work: Path) -> tuple[str, list[str]]:
    """End a run of torchrun at a random moment by a signal, then resume it. Return what got it, and what was broken."""
    agent, words, log = _torchrun(root, work)
    place = work / "place"
    resumed = [*words[:2], "-o", str(place / "run"), "--max-steps", "8", "--resume", "auto", "-q"]
    time.sleep(seconds * chance.uniform(0.3, 0.95))
    if how == "SIGKILL":
        which = _killed(agent, chance)
    else:
        which = f"by {how}" if agent.poll() is None else "nobody: it had ended"
        agent.send_signal(signal.Signals[how])
    return which, [*_after(agent, place, log), *_resumed(resumed, words, place, log, work)]


def _torchrun(root: Path, work: Path) -> tuple[subprocess.Popen[bytes], list[str], Path]:
    """Start a run in a new place. Return its agent, the arguments of ktc, and the log."""
    place, log = work / "place", work / "torchrun.log"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    shutil.copytree(root / "tuned", place / "tuned")
    words = [word.format(root=root, place=place) for word in RUN.split()]
    return started([*TORCHRUN, "-m", "ktc", *words], log, work), words, log


def _killed(agent: subprocess.Popen[bytes], chance: Random) -> str:
    """Kill the agent with all its children, or one of the children. Return which."""
    with suppress(psutil.Error):
        whole_tree = psutil.Process(agent.pid)
        ranks = [each for each in whole_tree.children() if "ktc" in " ".join(each.cmdline())]
        if ranks and chance.random() < 0.75:
            chance.choice(ranks).kill()
            return "one process"
        for each in (*whole_tree.children(recursive=True), whole_tree):
            with suppress(psutil.Error):
                each.kill()
        return "all"
    return "nobody: it had ended"


def _after(agent: subprocess.Popen[bytes], place: Path, log: Path) -> Iterator[str]:
    try:
        agent.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        agent.kill()
        yield f"the others went on for {PATIENCE:g} s"
    said = log.read_text(errors="replace")
    if "U099" in said:
        begin = said.index("U099")
        yield f"a bug: {said[max(begin - 4000, 0) : begin + 1000]}"
    for checkpoint in (place / "run").glob("checkpoint-*"):
        if not (checkpoint / "trainer_state.json").is_file():
            yield f"{checkpoint.name} is not whole"


def _resumed(resumed: Sequence[str], words: Sequence[str], place: Path, log: Path, work: Path) -> Iterator[str]:
    """Bring the run to its end: anew, where no step was finished."""
    begun = (place / "run" / "train.yaml").is_file() and bool(checkpoints(place / "run"))
    again = list(resumed) if begun else [*words, "--force"]
    code = started([*TORCHRUN, "-m", "ktc", *again], log, work).wait(600)
    if code != 0:
        yield f"the next run ends with {code}: {log.read_text(errors='replace')[-600:]}"
    elif left := unfinished(place):
        yield f"the next run did not sweep {left}"


def _end_runs(hows: Sequence[str], jobs: int, seed: int, root: Path, work: Path) -> bool:
    """End runs of torchrun by these signals, and print how. Return whether a promise was broken."""

    def ended(number: int, how: str) -> tuple[str, list[str]]:
        own = work / f"run-{number}"
        try:
            return ended_run(how, seconds, Random(f"{seed}-{number}"), root, own)
        finally:
            shutil.rmtree(own, ignore_errors=True)

    counts, failed = Counter[str](), False
    with ThreadPoolExecutor(jobs) as pool:
        first = [pool.submit(whole_run, root, work / f"whole-{number}") for number in range(jobs)]
        seconds = max(each.result() for each in first)
        for which, broken in pool.map(ended, range(len(hows)), hows):
            counts[which] += 1
            print(*(f"torchrun, ended {which}: BROKEN {each}" for each in broken), sep="\n", end="", flush=True)
            failed |= bool(broken)
    print(f"torchrun, 2 processes: ended {dict(counts)}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="processes", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="commands of commands.py, and `torchrun`; default: all")
    parser.add_argument("--kills", type=int, default=10, help="of runs of torchrun")
    parser.add_argument(
        "--signals", type=int, default=2, help="SIGINT and SIGTERM to runs of torchrun, of each so many"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs of torchrun at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="a folder whose prepared models are kept for the next time")
    asked = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory(prefix="processes-") as name:
        work = (asked.work or Path(name)).resolve()
        root = work / "root"
        if not root.exists():
            root.mkdir(parents=True)
            prepare(root, lambda words: started([*KTC, *words], work / "prepare.log", work).wait(600))
        for command in COMMANDS:
            chosen = command.name in asked.names if asked.names else not command.name.startswith(("bench", "kernel"))
            if chosen and command.made:
                codes, broken = two_at_once(command, root, work)
                print(f"two of {command.name}: {codes}", *(f"BROKEN {each}" for each in broken), sep="\n  ", flush=True)
                failed |= bool(broken)
        if "torchrun" in asked.names or not asked.names:
            hows = ["SIGKILL"] * asked.kills + ["SIGINT", "SIGTERM"] * asked.signals
            failed |= _end_runs(hows, asked.jobs, asked.seed, root, work)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
