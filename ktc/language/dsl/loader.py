"""Load rule files into parsed units: find bundled programs, follow imports, keep them inside their folder.

An imported path is relative to the importing file. After symbolic links it must be inside the entry file's folder;
`std/...` is the bundled library. Refused: absolute paths, `..`, cycles, files too many, too large or not UTF-8.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ktc.diagnostics import Diagnostic, InputRefused, Span, listing, suggest
from ktc.foundation import resources
from ktc.foundation.machine_faults import is_machine_fault
from ktc.foundation.regular_files import open_regular
from ktc.language.dsl import parser, syntax
from ktc.language.dsl.source_text import count_words

MAX_FILES = 64
MAX_IMPORT_DEPTH = 16
MAX_PATH = 200
SUFFIX = ".ktr"


@dataclass(slots=True)
class SourceUnit:
    """One parsed file. `importer` and `arguments` come from the first `import ... with (...)` of this file.

    `damaged`: some declarations do not parse, so an unknown name may be declared in one of them.
    """

    module: syntax.Module
    prefix: str
    index: int
    imports: dict[str, int] = field(default_factory=dict[str, int])
    broken_imports: set[str] = field(default_factory=set[str])  # aliases whose files failed to load
    importer: int | None = None
    arguments: tuple[syntax.Argument, ...] = ()
    damaged: bool = False


@dataclass(slots=True)
class Program:
    """All files that were read. `units[0]` is the entry; an importer precedes its imports."""

    units: list[SourceUnit] = field(default_factory=list[SourceUnit])
    sources: dict[str, str] = field(default_factory=dict[str, str])
    diagnostics: list[Diagnostic] = field(default_factory=list[Diagnostic])


def read_program(path_or_name: str | Path) -> Program:
    """Return the entry file and all its imports, with the diagnostics of every file.

    Raises InputRefused if the entry file cannot be read.
    """
    path, shown = _locate(path_or_name)
    loader = _Loader(path, shown)
    loader.load(path, prefix="", chain=())
    if not loader.program.units:
        raise InputRefused(*loader.program.diagnostics, sources=loader.program.sources)
    return loader.program


def _locate(path_or_name: str | Path) -> tuple[Path, str]:
    """Return the entry's path and its display name.

    A bundled program is shown by name, another file relative to the working folder if it is below it.
    """
    if (
        isinstance(path_or_name, str)
        and PurePosixPath(path_or_name).name == path_or_name
        and not path_or_name.endswith(SUFFIX)
    ):
        return _bundled(path_or_name), path_or_name + SUFFIX
    path = Path(path_or_name)
    if not path.is_file():
        what = (
            "is a folder" if path.is_dir() else "is not a regular file" if os.path.lexists(path) else "does not exist"
        )
        hint = "" if path.is_dir() else suggest(path.name, (file.name for file in path.parent.glob(f"*{SUFFIX}")))
        raise InputRefused(Diagnostic("E011", f"the rule file `{path}` {what}", hint=hint))
    absolute, here = path.absolute(), Path.cwd()
    return path, str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(path)


def _bundled(name: str) -> Path:
    path = resources.rules() / (name + SUFFIX)
    if path.is_file():
        return path
    names = bundled()
    hint = suggest(name, names) or f"bundled programs: {listing(names)}; a file is given by its path"
    raise InputRefused(Diagnostic("E011", f"there is no bundled rule program `{name}`", hint=hint))


def bundled() -> list[str]:
    """Return the names of the bundled programs."""
    return sorted(file.stem for file in resources.rules().glob(f"*{SUFFIX}"))


def read_text(path: Path, shown: str) -> str:
    """Return the text of a rule file. Raises InputRefused if it is not UTF-8, too large or unreadable.

    A fault of the machine, such as no free descriptor, is raised as it came.
    """
    start = Span(shown, 1, 1, 1, 1)
    try:
        with open_regular(path) as file:
            content = file.read(parser.MAX_BYTES + 1)
        if len(content) <= parser.MAX_BYTES:
            return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputRefused(Diagnostic("E013", f"this file is not UTF-8 (byte {error.start})", start)) from error
    except OSError as error:
        if is_machine_fault(error, vanished=False):
            raise
        raise InputRefused(Diagnostic("E011", f"this file cannot be read: {error.strerror}", start)) from error
    raise InputRefused(Diagnostic("E013", f"a file has at most {parser.MAX_BYTES} bytes", start))


class _Loader:
    def __init__(self, entry: Path, shown: str) -> None:
        self.program = Program()
        self.root = entry.resolve().parent
        self.std = (resources.rules() / "std").resolve()
        self.shown_root = PurePosixPath(Path(shown).as_posix()).parent
        self.entry = entry.resolve()
        self.entry_shown = shown
        self.loaded: dict[Path, int | None] = {}
        self.words = 0

    def load(self, path: Path, prefix: str, chain: tuple[Path, ...]) -> int | None:
        """Return the unit's index, or `None` after reporting that the file cannot be used."""
        real = path.resolve()
        if real in self.loaded:
            return self.loaded[real]
        self.loaded[real] = None
        module = self._parse(real)
        if module is None:
            return None
        damaged = any(d.span and d.span.file == module.file for d in self.program.diagnostics)
        unit = SourceUnit(module, prefix, index=len(self.program.units), damaged=damaged)
        self.program.units.append(unit)
        self.loaded[real] = unit.index
        for declaration in module.declarations:
            if isinstance(declaration, syntax.Import):
                self._import(declaration, unit, (*chain, real))
        return unit.index

    def _parse(self, real: Path) -> syntax.Module | None:
        shown = self._shown(real)
        try:
            text = read_text(real, shown)
        except InputRefused as error:
            self.program.diagnostics += error.diagnostics
            return None
        self.program.sources[shown] = text
        self.words += count_words(text)
        if self.words > parser.MAX_WORDS:
            self._refuse("E013", f"a program has at most {parser.MAX_WORDS} words", Span(shown, 1, 1, 1, 1))
            return None
        try:
            module, diagnostics = parser.parse_recovering(text, shown)
        except InputRefused as error:
            self.program.diagnostics += error.diagnostics
            return None
        self.program.diagnostics += diagnostics
        return module

    def _import(self, declaration: syntax.Import, unit: SourceUnit, chain: tuple[Path, ...]) -> None:
        alias = alias_of(declaration)
        if alias in unit.imports or alias in unit.broken_imports:
            self._refuse(
                "E020", f"two imports are called `{alias}`", declaration.span, "give one another name: `as NAME`"
            )
            return
        index = self._load_import(declaration, unit, alias, chain)
        if index is None:
            unit.broken_imports.add(alias)
            return
        unit.imports[alias] = index
        self._give_arguments(self.program.units[index], unit, declaration)

    def _load_import(
        self, declaration: syntax.Import, unit: SourceUnit, alias: str, chain: tuple[Path, ...]
    ) -> int | None:
        path = self._resolve(declaration.path, chain[-1])
        if path is None:
            return None
        span = declaration.path.span
        if path in chain:
            names = [self._shown(step) for step in (*chain[chain.index(path) :], path)]
            self._refuse("E012", "files import each other in a circle", span, label=" -> ".join(names))
            return None
        if len(self.loaded) >= MAX_FILES and path not in self.loaded:
            self._refuse("E013", f"a program has at most {MAX_FILES} files", span)
            return None
        if len(chain) > MAX_IMPORT_DEPTH:
            self._refuse("E013", f"imports are nested deeper than {MAX_IMPORT_DEPTH}", span)
            return None
        return self.load(path, f"{unit.prefix}{alias}.", chain)

    def _give_arguments(self, imported: SourceUnit, importer: SourceUnit, declaration: syntax.Import) -> None:
        if imported.importer is None:
            imported.importer, imported.arguments = importer.index, declaration.arguments
        elif imported.arguments != declaration.arguments:
            message = f"`{declaration.path.value}` is imported twice with different parameters"
            self._refuse(
                "E014", message, declaration.span, "a file is loaded once: give the same `with (...)` everywhere"
            )

    def _resolve(self, text: syntax.Text, importer: Path) -> Path | None:
        path = PurePosixPath(text.value)
        refusal = _refusal(text.value, path)
        if refusal:
            self._refuse(
                "E010", f"import refused: {refusal}", text.span, "imports are relative paths inside this folder"
            )
            return None
        in_std = path.parts[0] == "std"
        base = self.std.parent if in_std else importer.parent
        home = self.std if in_std or importer.is_relative_to(self.std) else self.root
        candidate = base / path
        if not candidate.is_file():
            inside = candidate.parent.resolve().is_relative_to(home)
            names = [str(path.parent / file.name) for file in candidate.parent.glob(f"*{SUFFIX}")] if inside else []
            self._refuse("E011", f"there is no file `{text.value}`", text.span, suggest(text.value, names))
            return None
        real = candidate.resolve()
        if not real.is_relative_to(home):
            self._refuse("E010", "import refused: the link leaves the folder of the program", text.span)
            return None
        return real

    def _shown(self, real: Path) -> str:
        if real == self.entry:
            return self.entry_shown
        if real.is_relative_to(self.std):
            return str(PurePosixPath("std") / real.relative_to(self.std).as_posix())
        return str(self.shown_root / real.relative_to(self.root).as_posix())

    def _refuse(self, code: str, message: str, span: Span, hint: str = "", label: str = "") -> None:
        self.program.diagnostics.append(Diagnostic(code, message, span, label=label, hint=hint))


def alias_of(declaration: syntax.Import) -> str:
    """Return an import's alias: its `as NAME`, otherwise the file's stem with `_` for `-`."""
    if declaration.alias is not None:
        return declaration.alias.text
    return PurePosixPath(declaration.path.value).stem.replace("-", "_")


def _refusal(text: str, path: PurePosixPath) -> str:
    if len(text) > MAX_PATH or not text.isprintable() or "\\" in text or ":" in text:
        return "the path is not a plain relative path"
    if path.is_absolute():
        return "the path is absolute"
    if ".." in path.parts:
        return "the path contains `..`"
    if path.suffix != SUFFIX:
        return f"a rule file ends in {SUFFIX}"
    return ""
