"""Packing that is killed, interrupted or refused a write: what is finished is kept, nothing is half-written."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from forks import in_a_child, kill_this

import ktc
from ktc.cli import app as cli
from ktc.diagnostics import KtcError
from ktc.foundation.host import find_compiler
from ktc.model.packed_store import packed_file, packed_store
from ktc.stages.link import link

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
    pytest.mark.usefixtures("one_thread"),
]
CALLS = ("posix_fallocate", "pwrite", "fsync", "rename")  # every step by which a file comes to be


@pytest.fixture(scope="module")
def unpacked(checkpoint: Path, hand_made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link(hand_made.package(checkpoint, hand_made.scalar_kernel()), tmp_path_factory.mktemp("build") / "v2_out")


@pytest.fixture
def out(unpacked: Path, tmp_path: Path) -> Path:
    return shutil.copytree(unpacked, tmp_path / "packed_twin")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "packed").iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def expected(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The store that an undisturbed run makes."""
    whole = shutil.copytree(unpacked, tmp_path_factory.mktemp("whole") / "packed_twin")
    ktc.pack(whole)
    return files(whole)


def pack_and_die(folder: Path, at: int, after: bool) -> Callable[[], object]:
    """Pack, and be killed before or after the call number `at` to the system."""

    def run() -> None:
        left = iter(range(at, -1, -1))

        def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*arguments: Any) -> Any:
                fatal = next(left) == 0
                if fatal and not after:
                    kill_this()
                result = call(*arguments)
                if fatal:
                    kill_this()
                return result

            return wrapped

        for name in CALLS:
            setattr(os, name, deadly(getattr(os, name)))
        ktc.pack(folder)

    return run


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_at_any_call_leaves_a_store_that_is_gone_on_with(
    out: Path, expected: dict[str, bytes], after: bool
) -> None:
    """A dozen calls to the system make two layers and the index; the process dies at each of them in turn."""
    deaths, kept = 0, set[int]()
    while in_a_child(pack_and_die(out, deaths, after)) == -signal.SIGKILL:
        deaths += 1
        assert deaths < 100
        for name, content in files(out).items():
            assert name.startswith(".") or content == expected[name], "a name stands for a whole file"
        with pytest.warns(UserWarning, match="not finished") if "packed.json" not in files(out) else nothing():
            ktc.load(out)
        report = ktc.pack(out)
        kept.add(len(report.kept))
        assert files(out) == expected
        shutil.rmtree(out / "packed")
    assert deaths >= 12
    assert kept == {0, 1, 2}


class nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


COMMAND = [sys.executable, "-m", "ktc", "pack"]


@pytest.fixture(scope="module")
def slow(hand_made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled model that takes a moment to pack."""
    folder = tmp_path_factory.mktemp("slow")
    return link(hand_made.package(hand_made.zeros(folder / "model"), hand_made.scalar_kernel()), folder / "slow_out")


@pytest.fixture
def started(slow: Path) -> Iterator[subprocess.Popen[str]]:
    """A packing process that has begun to write."""
    shutil.rmtree(slow / "packed", ignore_errors=True)
    process = subprocess.Popen([*COMMAND, str(slow)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not any((slow / "packed").glob(".*")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.002)
    yield process
    process.kill()
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_ended_leaves_what_it_finished(
    slow: Path, started: subprocess.Popen[str], number: signal.Signals
) -> None:
    time.sleep(random.Random(number).uniform(0, 0.2))
    started.send_signal(number)
    _, said = started.communicate()
    left = {path.name for path in (slow / "packed").iterdir()}
    assert "packed.json" not in left
    if number == signal.SIGINT:
        assert started.returncode == 130
        assert "to continue: `ktc pack" in said
        assert not any(name.startswith(".") for name in left), "an interrupt leaves no draft"
    assert started.returncode != 0
    report = ktc.pack(slow)
    assert len(report.packed) + len(report.kept) == 3
    assert len(report.kept) == sum(not name.startswith(".") for name in left)
    assert all(finding.state == "good" for finding in ktc.verify(slow))


# Writes that are refused


def refused(code: str, folder: Path) -> str:
    with pytest.raises(KtcError) as error:
        ktc.pack(folder)
    assert [d.code for d in error.value.diagnostics] == [code]
    return str(error.value)


def test_a_limit_on_files_is_told_and_leaves_nothing_half_written(out: Path, expected: dict[str, bytes]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (packed_file.DATA + 1000, limits[1]))
    try:
        assert "File too large" in refused("L444", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(out) == {}
    ktc.pack(out)
    assert files(out) == expected


@pytest.mark.parametrize("call", CALLS)
def test_a_full_disk_is_told_and_leaves_nothing_half_written(
    out: Path, expected: dict[str, bytes], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        assert "No space left on device" in refused("L444", out)
    assert files(out) == {}
    ktc.pack(out)
    assert files(out) == expected


def test_a_disk_that_is_too_small_is_found_before_the_work(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))
    assert "its disk has 5" in refused("L444", out)


def test_a_place_that_cannot_be_written_is_told(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (out / "packed").write_text("a file is in the way")
    assert cli.main(["pack", str(out)]) == 2
    assert "error[L444]" in capfd.readouterr().err


def test_two_packers_do_not_write_at_once(out: Path) -> None:
    def inner(done: int, total: int) -> None:
        if not tried:
            tried.append(refused("L445", out))

    tried: list[str] = []
    ktc.pack(out, progress=inner)
    assert tried
    assert packed_store.read_index(out)


def test_the_command_line_packs_and_verifies(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import json

    assert cli.main(["verify", str(out), "--json"]) == 0
    names = [finding["name"] for finding in json.loads(capfd.readouterr().out)["findings"]]
    assert "packed store" not in names
    assert cli.main(["pack", str(out), "--json"]) == 0
    report = json.loads(capfd.readouterr().out)["packed"]
    assert (len(report["packed"]), report["kept"]) == (2, [])
    assert cli.main(["pack", str(out)]) == 0
    assert "0 layers packed" in capfd.readouterr().out
    assert cli.main(["verify", str(out), "--source"]) == 0
    assert capfd.readouterr().out.count("packed from source") == 2
    path = out / "packed" / packed_store.file_name("model.layers.1.mlp.experts")
    with path.open("r+b") as file:
        file.seek(packed_file.DATA + 7)
        file.write(b"?")
    assert cli.main(["verify", str(out)]) == 1
    assert "altered" in capfd.readouterr().out
    assert cli.main(["verify", str(out.parent)]) == 2
    assert "error[L400]" in capfd.readouterr().err
