"""`Updates`: new weights and adapters for a server that answers requests meanwhile.

In: names of folders below one folder. Out: the served model with those weights, or with adapters loaded, replaced or
removed. All of an update is read and checked beside the running requests, before the model changes. New weights then
wait until the running requests have ended; an adapter changes between two steps.
Refused: a folder outside (G728), one that is not whole files (G728), a name that is taken or unknown (G729), a second
update at the same time (`UpdateRunning`), and everything that a load refuses. The model is then as before, bit for bit.
"""

from __future__ import annotations

import itertools
import stat
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ktc.diagnostics import Diagnostic, InputRefused, KtcError
from ktc.inference.serving.engine import Engine
from ktc.inference.serving.metrics import Metrics
from ktc.inference.serving.models import LoadedAdapters, ServedModel, ServedModels, with_adapter
from ktc.inference.serving.request import Refused
from ktc.model.loading.refresh import Stage

Kind = Literal["weights", "adapter"]
_LONGEST_PATH: Final = 4096
_LONGEST_NAME: Final = 200


class UpdateRunning(Exception):
    """Another update is under way."""


@dataclass(frozen=True, slots=True)
class Applied:
    """An update: its seconds until all was checked, and from there until it took effect."""

    what: str
    checked: float
    waited: float


class Updates:
    """The updates of one server, one at a time. Methods are called on any thread but the engine's."""

    def __init__(
        self, root: Path, models: ServedModels, adapters: LoadedAdapters, engine: Engine, metrics: Metrics
    ) -> None:
        """Take folders below `root`."""
        self._root = root.resolve()
        self._models, self._adapters, self._engine, self._metrics = models, adapters, engine, metrics
        self._busy = threading.Lock()
        self._numbers = itertools.count()

    def weights(self, folder: str, patience: float) -> Applied:
        """Replace all weights when no request runs; new requests wait for it.

        Raises InputRefused and HostLacks of `Stage`, and TimeoutError if requests ran for longer than `patience`.
        """
        with self._counted("weights"):
            checkpoint, begun = self._folder(folder), time.monotonic()
            stage = self._engine.change(lambda: Stage.for_model(self._adapters.base))
            staged = stage.fill(checkpoint, self._go_on)
            checked = time.monotonic()

            def apply() -> None:
                staged.apply()
                self._engine.forget()

            self._engine.change(apply, idle=True, patience=patience)
            return Applied(folder, checked - begun, time.monotonic() - checked)

    def adapter(self, name: str, folder: str) -> Applied:
        """Load an adapter, or replace the one of that name: requests under way keep the old one.

        Raises InputRefused (G729 and the errors of an adapter).
        """
        from ktc.adapters.adapter import read_adapter, require_finite, require_fit

        with self._counted("adapter"):
            self._require_name(name)
            path, begun = self._folder(folder), time.monotonic()
            base, adapter = self._adapters.base, read_adapter(path)
            require_fit(adapter, base, str(base.name_or_path))
            require_finite(adapter)
            opened = with_adapter(self._models.default.opened, base, path)
            checked = time.monotonic()
            key = f"updated_{next(self._numbers)}"
            self._engine.change(lambda: self._adapters.load(key, path))
            old = self._models.names.get(name)
            self._models.put(name, ServedModel(opened, key))
            if old is not None:
                self._engine.retire(old.adapter)
            return Applied(name, checked - begun, time.monotonic() - checked)

    def remove(self, name: str) -> Applied:
        """Remove an adapter: requests under way end with it. Raises InputRefused (G729)."""
        with self._counted("adapter"):
            self._require_name(name)
            served = self._models.names.get(name)
            if served is None:
                raise InputRefused(Diagnostic("G729", f"there is no adapter `{name}`", hint="see /v1/models"))
            self._models.drop(name)
            self._engine.retire(served.adapter)
            return Applied(name, 0.0, 0.0)

    @contextmanager
    def _counted(self, kind: Kind) -> Generator[None]:
        if not self._busy.acquire(blocking=False):
            raise UpdateRunning
        outcome = "failed"
        try:
            yield
            outcome = "applied"
        except KtcError:
            outcome = "refused"
            raise
        except (TimeoutError, Refused):
            outcome = "timed out"
            raise
        finally:
            self._busy.release()
            self._metrics.updates.labels(kind, outcome).inc()

    def _go_on(self, *_: int) -> None:
        """Raise Refused where the server stops meanwhile."""
        if self._engine.is_stopping:
            raise Refused("stopping", "the server stops")

    def _require_name(self, name: str) -> None:
        """Raise InputRefused (G729) for the model's own name, and for one that no request could have."""
        if not name or len(name) > _LONGEST_NAME or not name.isprintable():
            message = f"an adapter's name has 1 to {_LONGEST_NAME} printable characters"
            raise InputRefused(Diagnostic("G729", message, hint="name it as requests do in `model`"))
        if name == next(iter(self._models.names)):
            message = f"`{name}` is the name of the model, which stays as it was started"
            raise InputRefused(Diagnostic("G729", message, hint="give the adapter a name of its own"))

    def _folder(self, given: str) -> Path:
        """Return a folder below the root whose files are regular ones below it too. Raises InputRefused (G728)."""
        hint = "name a folder below the one of `--updates`"
        try:
            path = (self._root / given).resolve() if 0 < len(given) <= _LONGEST_PATH else None
            fault = "it is not a folder below" if path is None else _fault(path, self._root)
        except (OSError, ValueError, RuntimeError) as error:  # NUL, a loop of links, no permission
            path, fault = None, f"it cannot be read ({type(error).__name__}) below"
        if path is None or fault:
            message = f"`{_shown(given)}` is refused: {fault} the folder of updates"
            raise InputRefused(Diagnostic("G728", message, hint=hint))
        return path


def _fault(path: Path, root: Path) -> str:
    if path == root or not path.is_relative_to(root) or not path.is_dir():
        return "it is not a folder below"
    for entry in path.iterdir():
        mode = entry.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            return f"`{_shown(entry.name)}` is not a regular file in"
        if not entry.resolve().is_relative_to(root):
            return f"`{_shown(entry.name)}` is a link that leaves"
    return ""


def _shown(text: str) -> str:
    return text[:100].encode("utf-8", "replace").decode()
