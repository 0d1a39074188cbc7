"""The options of a session, declared once: `--json`, `--verbose`, `--quiet` and `--log-file`.

In: a command whose first parameter is its `Session`. Out: the command for typer, with these options instead of that
parameter. First, what killed processes of ktc left is removed where the command writes. Paths that it reads stay as
they are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, cast

from ktc.cli.options import Json, LogFile, Quiet, Verbose
from ktc.cli.session import Session
from ktc.foundation.files import remove_stale_temp

P = ParamSpec("P")

_OPTIONS: Final[Mapping[str, inspect.Parameter]] = {
    name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    for name, default, annotation in (
        ("as_json", False, Json),
        ("verbose", False, Verbose),
        ("quiet", False, Quiet),
        ("log_file", None, LogFile),
    )
}

_MANIFEST: Final = "ktc.json"
_STORE: Final = "packed"  # of a compiled model, the folder that `ktc pack` fills
_WRITTEN: Final = ("output", "plot", "trace")  # parameters with the path of a result


def in_session(
    *names: str, writes: tuple[str, ...] = ()
) -> Callable[[Callable[Concatenate[Session, P], None]], Callable[..., None]]:
    """Run the decorated command within a `Session` that has the options `names`; without names, all four.

    `writes` are parameters with paths that the command writes, besides those named in `_WRITTEN`.
    """
    options = [_OPTIONS[name] for name in names or _OPTIONS]

    def decorate(command: Callable[Concatenate[Session, P], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(*arguments: Any, **named: Any) -> None:
            chosen = {option.name: named.pop(option.name, option.default) for option in options}
            with Session(**chosen) as session:
                written = inspect.signature(run).bind_partial(*arguments, **named).arguments
                for place in dict.fromkeys(_places(written.get(name) for name in (*_WRITTEN, *writes))):
                    remove_stale_temp(place)
                command(session, *arguments, **named)

        cast("Any", run).__signature__ = _with_options(command, options)
        return run

    return decorate


def _with_options(command: Callable[..., None], options: list[inspect.Parameter]) -> inspect.Signature:
    """Return the command's signature with `options` instead of its session, before `**` if there is one."""
    signature = inspect.signature(command, eval_str=True)
    _, *parameters = signature.parameters.values()
    has_rest = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    end = len(parameters) - has_rest
    return signature.replace(parameters=[*parameters[:end], *options, *parameters[end:]])


def _is_model(given: str) -> bool:
    """Return whether an argument MODEL|OUT names a model, which is only read."""
    folder = Path(given)
    return given.startswith("tiny:") or ((folder / "config.json").is_file() and not (folder / _MANIFEST).is_file())


def _places(values: Iterable[object]) -> Iterator[Path]:
    """Yield the parent of each path, the path and its packed store."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _places(cast("Iterable[object]", value))
        elif isinstance(value, Path):
            yield from (value.parent, value, value / _STORE)
        elif isinstance(value, str) and not _is_model(value):
            yield from _places([Path(value)])
