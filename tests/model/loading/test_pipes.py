"""A pipe in place of any file of a compiled model, its checkpoint or its adapter: nothing waits for a writer."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ktc
from ktc.adapters.adapter import attach
from ktc.cli import app as cli
from ktc.diagnostics import InputRefused


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError where something waits for longer."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def each_as_a_pipe(folder: Path, use: Callable[[], object]) -> dict[str, str]:
    """Use a folder once for every file of it with a pipe in its place. Return the refusals' codes by file."""
    codes: dict[str, str] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        aside = path.with_name(path.name + ".aside")
        path.rename(aside)
        os.mkfifo(path)
        try:
            with within(20):
                use()
        except InputRefused as refused:
            codes[str(path.relative_to(folder))] = refused.diagnostics[0].code
        finally:
            path.unlink()
            aside.rename(path)
    return codes


def test_a_pipe_in_a_compiled_model_is_refused(compiled: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(compiled, out)
    codes = each_as_a_pipe(out, lambda: ktc.load(out, reference=True))
    assert {"ktc.json", "config.json", "weights.json", "lora.json", "modeling_ktc.py"} <= codes.keys()


def test_a_pipe_in_a_checkpoint_is_refused(checkpoint: Path, compiled: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    shutil.copytree(checkpoint, weights)
    codes = each_as_a_pipe(weights, lambda: ktc.load(compiled, weights=weights, reference=True))
    assert {"config.json", "model.safetensors.index.json"} <= codes.keys()
    assert {path.name for path in weights.glob("*.safetensors")} <= codes.keys()


def test_a_pipe_in_an_adapter_is_refused(adapter: Path, compiled: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)
    model = ktc.load(compiled, reference=True)
    codes = each_as_a_pipe(folder, lambda: attach(model, folder, alone=True))
    assert {"adapter_config.json", "adapter_model.safetensors"} <= codes.keys()


def test_verify_ends_with_a_pipe_in_place_of_any_file(compiled: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(compiled, out)

    def verify() -> None:
        assert cli.main(["verify", str(out), "--json"]) in (0, 1, 2)

    each_as_a_pipe(out, verify)
