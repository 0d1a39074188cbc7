"""`ktc train` starts a process for each GPU where that was planned or asked for, and ends them together."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer

from ktc.cli import processes
from ktc.cli.session import Session
from ktc.diagnostics import Diagnostic, HostLacks, InputRefused
from ktc.foundation import environment
from ktc.training.tune import train
from ktc.training.tune.settings import TrainSettings


class Told:
    """A session whose remarks are kept."""

    def __init__(self) -> None:
        self.remarks: list[str] = []

    def tell(self, text: str) -> None:
        self.remarks.append(text)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    ("planned", "gpus", "settings", "expected", "why"),
    [
        (1, 2, {}, 1, ""),
        (2, 2, {}, 2, ""),
        (2, 4, {}, 2, ""),
        (2, 2, {"processes": 1}, 1, ""),
        (1, 0, {"processes": 4}, 4, ""),
        (2, 1, {}, 1, "one process instead of the 2 that were planned: this machine shows 1 GPUs"),
        (2, 2, {"accumulation": 3}, 1, "one process instead of the 2 that were planned: they cannot share 3"),
    ],
)
def test_as_many_processes_as_asked_or_planned(
    planned: int, gpus: int, settings: dict[str, Any], expected: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ktc.model.manifest.manifest.read_manifest",
        lambda folder: SimpleNamespace(processes=planned, placement={}, rewrites=()),
    )
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    session: Any = Told()
    assert processes.count_of(session, Path("out"), TrainSettings(**settings)) == expected
    assert why in "".join(session.remarks)
    assert bool(session.remarks) == bool(why)


@pytest.mark.parametrize("world", ["1", "2"])
def test_a_process_of_torchrun_starts_no_others(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    assert processes.count_of(cast("Any", Told()), Path("out"), TrainSettings(processes=2)) == 1


def test_as_many_as_asked_need_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = SimpleNamespace(processes=1, placement={"": "cuda:0"}, rewrites=(), memory={})
    monkeypatch.setattr("ktc.model.manifest.manifest.read_manifest", lambda folder: manifest)
    monkeypatch.setattr("ktc.model.packed_store.process_gpu.for_process", lambda given, *others: given)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(HostLacks, match="L409: this run has 2 processes"):
        processes.count_of(cast("Any", Told()), Path("out"), TrainSettings(processes=2))


@pytest.mark.parametrize("world", ["", "4"])
def test_another_number_than_runs_is_refused(world: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In Python, and under torchrun: neither starts what `processes` says."""
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(InputRefused, match=f"T503: `processes` is 2, and this run has {world or 1}"):
        train.run(train.RunPaths(tmp_path, tmp_path / "run"), TrainSettings(processes=2))


def test_started_processes_leave_the_log_of_their_starter(tmp_path: Path) -> None:
    with pytest.raises(typer.Exit), Session(log_file=tmp_path / "log") as starter:
        starter.note("before")
        for variables in environment.of_processes(tmp_path, 2, 1, tmp_path):
            code = "from ktc.cli.session import Session\nfrom pathlib import Path\n"
            code += f"with Session(log_file=Path({str(tmp_path / 'log')!r})) as session: session.note('one')"
            subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, check=False)
        starter.note("after")
    assert [line.split()[-1] for line in (tmp_path / "log").read_text().splitlines()] == ["before", "one", "after"]
    assert (tmp_path / "log.rank1").read_text().split()[-1] == "one"


def test_each_process_has_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    first, second = environment.of_processes(Path("out"), 2, 8, Path("reports"))
    assert "TORCHELASTIC_USE_AGENT_STORE" not in first, "its store would be one that nobody serves"
    assert [one["RANK"] for one in (first, second)] == [one["LOCAL_RANK"] for one in (first, second)] == ["0", "1"]
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert Path(first["KTC_STARTED_FOR"]).is_absolute()


@pytest.mark.parametrize("begun", [False, True])
def test_one_that_fails_ends_the_others_and_its_code_counts(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once before the first step; after it, the others get a while to name it."""
    monkeypatch.setattr(processes, "_OTHERS", 0.2 if begun else 60.0)
    began = time.monotonic()
    started = [
        subprocess.Popen([sys.executable, "-c", code])
        for code in ("import time; time.sleep(60)", "raise SystemExit(3)")
    ]
    assert processes._ended(started, lambda: begun) == (3, [(1, 3)])
    assert time.monotonic() - began < 30
    assert started[0].returncode == -15


def as_ktc(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    """Let `python -m ktc` of started processes run `code`, after what `ktc train` begins with."""
    package = folder / "path" / "ktc"
    package.mkdir(parents=True)
    real = Path(environment.__file__).parents[1]
    main = "import os, sys, json, time\nfrom pathlib import Path\nfrom ktc.cli import started\n"
    main += "started.watch_starter()\nrank = os.environ['RANK']\nreports = Path(os.environ['KTC_STARTED_REPORTS'])\n"
    (package / "__main__.py").write_text(main + code)
    (package / "__init__.py").write_text(f"__path__ = [{str(package)!r}, {str(real)!r}]\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


class Shown(Told):
    """A session whose diagnostics are kept too."""

    stdout = 1

    def __init__(self) -> None:
        super().__init__()
        self.codes: list[str] = []
        self.object: dict[str, Any] = {}

    def diagnose(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.codes += [diagnostic.code for diagnostic in diagnostics]

    def adopt(self, result: dict[str, Any]) -> None:
        self.object = result


def error(code: str, message: str) -> str:
    return repr({"code": code, "severity": "error", "message": message, "hint": ""})


def leaving(*of_ranks: str) -> str:
    """Code of processes that leave an error each, and fail."""
    errors = ", ".join(of_ranks)
    both = "while len([*reports.glob('*.json')]) < 2:\n    time.sleep(0.01)\n"
    text = "json.dumps({'diagnostics': [errors[int(rank)]]})"
    return f"errors = [{errors}]\n(reports / f'{{rank}}.json').write_text({text})\n{both}raise SystemExit(2)\n"


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        (leaving(error("T521", "a run"), error("T521", "a run")), []),
        (leaving(error("T534", "rank 1 stopped"), error("U099", "a bug")), ["U099"]),
        ("if rank == '1':\n    os.kill(os.getpid(), 9)\ntime.sleep(60)\n", ["T534"]),
    ],
    ids=["alike", "of-another", "killed"],
)
def test_errors_of_processes_are_shown_once(
    code: str, shown: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    as_ktc(monkeypatch, tmp_path, code)
    session: Any = Shown()
    with pytest.raises(typer.Exit) as end:
        processes.run_in_processes(session, tmp_path, 2, may_fall_back=True)
    assert end.value.exit_code == (137 if "kill" in code else 2)
    assert session.codes == shown
    assert session.remarks == ["training in 2 processes, each with its part of a step and of the cores"]


def test_too_little_memory_on_a_gpu_falls_back_to_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "if rank == '0':\n    started.mark(started.CLAIMED)\n    (reports / '0.json').write_text('{}')\n"
    code += "    time.sleep(60)\n"
    as_ktc(monkeypatch, tmp_path, code + leaving(error("U116", "full"), error("U116", "full")))
    session: Any = Shown()
    assert processes.run_in_processes(session, tmp_path, 2, may_fall_back=True) == {"folder"}
    assert session.codes == ["U118"]


def runs(number: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{number}/status").read_text()
    except OSError:
        return False


def test_processes_end_with_a_starter_that_was_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where its folder stays
    as_ktc(monkeypatch, tmp_path, "print(os.getpid(), flush=True)\ntime.sleep(60)\n")
    code = (
        "import sys; from pathlib import Path; from types import SimpleNamespace; from ktc.cli import processes\n"
        "session = SimpleNamespace(tell=print, stdout=1)\n"
        f"processes.run_in_processes(session, Path({str(tmp_path)!r}), 2, may_fall_back=False)\n"
    )
    starter = subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    assert starter.stdout.readline().startswith("training in 2 processes")
    numbers = [int(starter.stdout.readline()) for _ in range(2)]
    starter.kill()
    starter.wait()
    until = time.monotonic() + 20
    while any(runs(number) for number in numbers):
        assert time.monotonic() < until, "they hold GPUs"
        time.sleep(0.05)


def test_processes_do_not_import_from_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_ktc(monkeypatch, tmp_path, "import colorsys\n")
    (tmp_path / "colorsys.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(typer.Exit) as end:
        processes.run_in_processes(cast("Any", Shown()), tmp_path, 2, may_fall_back=False)
    assert end.value.exit_code == 0
