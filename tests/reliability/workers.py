"""Processes that run commands with faults, each in a folder of its own, several at a time.

In: a folder with the prepared models (`root`), which all share, as they share its cache. Out: how each command ended,
and the promises that it broke.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from reliability.commands import Command, prepare
from reliability.faults import KILL, Fault, Forked, Outcome
from reliability.promises import Expected, broken_by_an_error, broken_by_its_end, sizes, unfinished, whole

# A full disk stays full; a read or a descriptor may succeed next time.
LASTING = frozenset({"ENOSPC", "EDQUOT", "EROFS"})
Item = TypeVar("Item")
Found = TypeVar("Found")


class Worker(AbstractContextManager["Worker"]):
    """A folder for one command at a time, and the process whose forks are its runs."""

    def __init__(self, work: Path, name: str) -> None:
        self._folder = work / name
        self._temporary, self._own_cache = self._folder / "tmp", self._folder / "cache"
        self._temporary.mkdir(parents=True, exist_ok=True)
        env = {"KTC_CACHE_DIR": str(work / "cache"), "OMP_NUM_THREADS": "1", "TMPDIR": str(self._temporary)}
        self.root, self.place = work / "root", self._folder / "place"
        self._forked = Forked(env=env, cwd=self._folder)

    def __exit__(self, *_: object) -> None:
        self._forked.__exit__()

    def prepare(self) -> None:
        """Make the models and data that the commands read, unless they are there."""
        ready = self.root / "ready"  # paths of the folder are in its files, so it is made in its place
        if not ready.exists():
            shutil.rmtree(self.root, ignore_errors=True)
            self.root.mkdir(parents=True)
            prepare(self.root, lambda words: self._forked.warm(words)[0].code)
            ready.touch()

    def warm(self, command: Command) -> list[str]:
        """Run it once, so that its kernels are built. Return the names of the modules that it imported."""
        command.copy_needs(self.root, self.place)
        return self._forked.warm(command.arguments(self.root, self.place))[1]

    def learn(self, modules: list[str]) -> None:
        """Import modules, so that no fork has to."""
        self._forked.learn(modules)

    def count(self, command: Command, kind: str) -> tuple[Outcome, Expected]:
        """Run it without a fault. Return how it ended, with its calls, and its files."""
        command.copy_needs(self.root, self.place)
        before = sizes(self.place, command.made)
        outcome = self._run(command, kind, 0)
        return outcome, Expected(before, sizes(self.place, command.made))

    def attempt(self, command: Command, kind: str, at: int, expected: Expected) -> tuple[Outcome, list[str]]:
        """Run it with a fault from its prepared state. Return how it ended, and the promises that it broke."""
        outcome = self._run(command, kind, at)
        return outcome, list(self._broken(command, kind, outcome, expected))

    def _run(self, command: Command, kind: str, at: int) -> Outcome:
        command.copy_needs(self.root, self.place)
        folders, env = (str(self.place), str(self._temporary)), {}
        if command.cache:
            shutil.rmtree(self._own_cache, ignore_errors=True)
            folders, env = (*folders, str(self._own_cache)), {"KTC_CACHE_DIR": str(self._own_cache)}
        fault = Fault(folders, kind, at, kind in LASTING)
        return self._forked.run(command.arguments(self.root, self.place), fault, env=env)

    def _broken(self, command: Command, kind: str, outcome: Outcome, expected: Expected) -> Iterator[str]:
        if outcome.injected == 0:
            return  # it made fewer calls than before
        if kind != KILL:
            yield from broken_by_an_error(kind, outcome, self.place)
        names = (*command.made, "run/checkpoint-*")
        if torn := whole(sizes(self.place, names), expected, names, self.place):
            yield torn
        if kind == KILL and not outcome.killed:
            yield from broken_by_its_end(kind, outcome)
        if kind == KILL:
            yield from self._after_a_kill(command, expected)

    def _after_a_kill(self, command: Command, expected: Expected) -> Iterator[str]:
        words = command.arguments(self.root, self.place)
        done = set(sizes(self.place, command.made)) >= set(expected.after) and bool(expected.after)
        if command.name == "train" and (self.place / "run").exists():
            resumable = any((self.place / "run").glob("checkpoint-*"))
            words = [*words, "--resume", "auto"] if resumable else [*words, "--force"]
            if not (self.place / "run" / "train.yaml").is_file():
                shutil.rmtree(self.place / "run")
                words = command.arguments(self.root, self.place)
        env = {"KTC_CACHE_DIR": str(self._own_cache)} if command.cache else {}
        again = self._forked.run(words, Fault(("/nowhere",), KILL), env=env)
        exists = re.search(r"error\[(A609|I142)\]", again.err)
        if again.code != 0 and not (exists and done):
            yield f"the next run ends with {again.code}: {again.err.strip()[-400:]}"
        elif again.code == 0 and (left := unfinished(self.place)):
            yield f"the next run did not sweep {left}"


class Workers(AbstractContextManager["Workers"]):
    """Several workers on one prepared folder; `end` is the time after which none begins another run."""

    def __init__(self, work: Path, number: int, end: float = float("inf")) -> None:
        self._number, self._end = number, end
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        with ExitStack() as opened:
            first = opened.enter_context(Worker(work, "worker-0"))
            first.prepare()
            others = [opened.enter_context(Worker(work, f"worker-{each}")) for each in range(1, number)]
            self._opened = opened.pop_all()
        self._all: tuple[Worker, ...] = (first, *others)
        for worker in self._all:
            self._idle.put(worker)

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def warm(self, commands: Iterable[Command]) -> None:
        """Run each command once, and import in all workers what that imported."""
        modules = dict.fromkeys(name for _, names in self.map(Worker.warm, commands) for name in names)
        with ThreadPoolExecutor(self._number) as pool:
            for learnt in [pool.submit(worker.learn, list(modules)) for worker in self._all]:
                learnt.result()

    def map(self, act: Callable[[Worker, Item], Found], items: Iterable[Item]) -> Iterator[tuple[Item, Found]]:
        """Yield each item with what `act` made of it, as they end; those that time forbids are left out."""

        def one(item: Item) -> tuple[Item, Found] | None:
            worker = self._idle.get()
            try:
                return (item, act(worker, item)) if time.monotonic() < self._end else None
            finally:
                self._idle.put(worker)

        with ThreadPoolExecutor(self._number) as pool:
            for future in as_completed([pool.submit(one, item) for item in items]):
                if (found := future.result()) is not None:
                    yield found
