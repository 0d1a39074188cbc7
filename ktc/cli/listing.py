"""`ktc list`: what a user can name: programs, small models, data, machines, and compiled models here and in the cache.

In: the working folder and the cache. Out: a table, or with `--json` one object. Nothing is loaded, and a damaged
compiled model is shown as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, Final

from ktc.cli.amounts import relative, size
from ktc.cli.session import Session
from ktc.cli.session_options import in_session

_TWIN: Final = "a small model with random weights"
_USES: Final = {
    "programs": "for `ktc compile MODEL NAME`",
    "models": "for `ktc train NAME` and others, beside folders and hub ids",
    "data": "for `ktc train MODEL --data NAME`",
    "machines": "for `ktc plan MODEL --host NAME`",
    "compiled": "for `ktc generate NAME` and others",
    "cached": "compiled by `ktc train`, `generate` and `serve`",
}


@in_session("as_json", "verbose", "quiet")
def list_command(session: Session) -> None:
    """Show what you can name: programs, small models, data, machines, and compiled models here and in the cache."""
    compiled_here = [*_compiled(chain(Path().glob("*/ktc.json"), Path().glob("*/*/ktc.json")))]
    cached = [*_compiled(_cache().glob("*/ktc.json"))]
    sections: dict[str, list[dict[str, Any]]] = {
        "programs": [*_programs()],
        "models": [*_twins()],
        "data": [*_data()],
        "machines": [*_machines()],
        "compiled": compiled_here,
        "cached": cached,
    }
    session.result(sections)
    session.show("\n".join(_lines(sections)))
    whole = next((row["name"] for row in (*compiled_here, *cached) if "bytes" in row), None)  # not a damaged one
    session.next(*(("ktc", "graph", whole) if whole else ("ktc", "check", "auto", "tiny:qwen3_moe")))


def _lines(sections: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Yield a title for each section that has rows, and a line for each row."""
    for section, rows in sections.items():
        if not rows:
            continue
        yield f"{section}, {_USES[section]}:"
        width = max(len(str(row["name"])) for row in rows)
        for row in rows:
            words = " ".join(str(row[key]) for key in ("is", "model", "rules") if row.get(key))
            amount = f", {size(row['bytes'])}" if "bytes" in row else ""
            yield f"  {row['name']!s:<{width}}  {words}{amount}".rstrip()


def _programs() -> Iterator[dict[str, Any]]:
    """Yield the bundled programs, with the first sentence of their comment."""
    from ktc.foundation import resources
    from ktc.language.dsl import bundled

    for name in bundled():
        yield {"name": name, "is": _first_comment(resources.rules() / f"{name}.ktr")}


def _first_comment(path: Path) -> str:
    """Return the first sentence of the comment at the head of a file, up to a colon."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines))
    return comment.split(". ")[0].split(": ")[0].rstrip(".")


def _twins() -> Iterator[dict[str, Any]]:
    from ktc.model.hf.model_names import TINY, TWIN_SETTINGS

    yield from ({"name": f"{TINY}{name}", "is": _TWIN} for name in TWIN_SETTINGS)
    yield {"name": f"{TINY}FAMILY", "is": f"{_TWIN}, of any causal LM family of transformers"}


def _data() -> Iterator[dict[str, Any]]:
    from ktc.training.tune.bundled import data_file, names

    for name in names():
        rows = data_file(Path(name)).read_text(encoding="utf-8").count("\n")
        yield {"name": name, "is": f"{rows} rows"}


def _machines() -> Iterator[dict[str, Any]]:
    from ktc.foundation import resources

    for path in sorted(resources.hosts().glob("*.toml")):
        yield {"name": path.stem, "is": _first_comment(path)}


def _cache() -> Path:
    from ktc.foundation.environment import cache_dir

    return cache_dir() / "compiled"


def _compiled(manifests: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield the compiled models: their model, their rules and their bytes."""
    from ktc.diagnostics import KtcError
    from ktc.model.manifest.manifest import read_manifest

    for path in sorted(manifests):
        row: dict[str, Any] = {"name": relative(path.parent.absolute())}
        try:
            manifest = read_manifest(path.parent)
        except KtcError as error:
            yield row | {"is": error.diagnostics[0].message}
            continue
        files = (file.lstat().st_size for file in path.parent.rglob("*") if file.is_file())
        model = Path(manifest.model.name).name if manifest.model.name.startswith("/") else manifest.model.name
        yield row | {"model": model, "rules": f"by {Path(manifest.rules.name).stem}", "bytes": sum(files)}
