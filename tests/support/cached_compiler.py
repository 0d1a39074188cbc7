"""The C++ compiler of the tests: the real one behind a cache of objects that is addressed by their content.

`installed` writes a stand-in that has the real compiler's name; `$CXX` names it. A compilation (`-c`) is looked up by
everything that shapes its object: compiler, version, flags, the source without its lines of comment (a unit names the
rule that it was made for), and every file of its include folders. All else, as linking, goes to the real compiler as it
is. The quick tests compile at -Og, and never two of them the same object.
They parse the headers of the language once per set of flags, which takes a third of a compilation.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

UNUSED_DAYS = 14
QUICK = "-Og"  # of the quick tests
LANGUAGE = (
    "algorithm", "array", "atomic", "bit", "chrono", "cmath", "complex", "concepts", "cstddef", "cstdint", "cstring",
    "functional", "immintrin.h", "limits", "memory", "mutex", "optional", "stdexcept", "string", "string_view",
    "system_error", "thread", "type_traits", "utility", "vector",
)  # fmt: skip


def installed(folder: Path, compiler: str, version: str, objects: Path, optimise: str) -> Path:
    """Write the stand-in for `compiler` into `folder`. It keeps its objects in `objects`; -O3 becomes `optimise`."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / Path(compiler).name
    words = (sys.executable, "-I", "-S", __file__, compiler, version, str(objects), optimise)
    draft = folder / f"{program.name}.{os.getpid()}"
    draft.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
    draft.chmod(0o755)
    draft.rename(program)
    return program


def remove_unused(objects: Path) -> None:
    """Remove the objects that no run has used for `UNUSED_DAYS`."""
    oldest = time.time() - UNUSED_DAYS * 86400
    for item in objects.glob("*"):
        if item.stat().st_mtime < oldest:
            item.unlink(missing_ok=True)


def compile_object(compiler: str, version: str, objects: Path, flags: list[str]) -> int:
    """Compile as `flags` say, or copy the object of an equal compilation. Returns the compiler's exit status."""
    target = Path(flags[flags.index("-o") + 1])
    kept = objects / f"{digest(ingredients(compiler, version, flags))}.o"
    objects.mkdir(parents=True, exist_ok=True)
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.is_file():
            parsed = parsed_headers(compiler, version, objects, flags)
            status = subprocess.run([compiler, *parsed, *flags], check=False).returncode
            if status:
                return status
            draft = kept.with_suffix(".draft")
            shutil.copyfile(target, draft)
            draft.rename(kept)
            return 0
        kept.touch()
    shutil.copyfile(kept, target)
    return 0


def parsed_headers(compiler: str, version: str, objects: Path, flags: list[str]) -> list[str]:
    """Return the flags for the headers of `LANGUAGE` in their parsed form, none for units that few others are like."""
    if QUICK not in flags or any(flag.startswith("-D") for flag in flags):
        return []
    plain = [flag for flag in without_files(flags) if flag not in ("-c", "-o")]
    text = "".join(f"#include <{name}>\n" for name in LANGUAGE)
    headers = objects / f"{digest(word.encode() for word in (compiler, version, *plain, text))}.hpp"
    parsed = headers.with_suffix(".hpp.gch")
    with headers.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not parsed.is_file():
            headers.write_text(text, encoding="utf-8")
            draft = headers.with_suffix(".draft")
            command = [compiler, *plain, "-x", "c++-header", str(headers), "-o", str(draft)]
            if subprocess.run(command, check=False).returncode == 0:
                draft.rename(parsed)
        else:
            parsed.touch()
    return ["-include", str(headers)]


def digest(items: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for item in items:
        found.update(len(item).to_bytes(8, "little"))
        found.update(item)
    return found.hexdigest()


def without_files(flags: list[str]) -> list[str]:
    """Return the flags that name no file and no folder."""
    files = (flags[flags.index("-c") + 1], flags[flags.index("-o") + 1])
    return [flag for flag in flags if flag not in files and not flag.startswith("-I")]


def ingredients(compiler: str, version: str, flags: list[str]) -> Iterator[bytes]:
    """What shapes the object. Folders count by what they hold, so that two checkouts share their objects."""
    folders = [Path(flag[2:]) for flag in flags if flag.startswith("-I")]
    yield from (word.encode() for word in (compiler, version, *without_files(flags)))
    lines = Path(flags[flags.index("-c") + 1]).read_bytes().splitlines(keepends=True)
    yield b"".join(line for line in lines if not line.startswith(b"//"))
    for folder in folders:
        for file in sorted(item for item in folder.rglob("*") if item.is_file()):
            yield str(file.relative_to(folder)).encode()
            yield file.read_bytes()


def main(compiler: str, version: str, objects: str, optimise: str, *given: str) -> int:
    flags = [optimise if flag == "-O3" else flag for flag in given]
    if "-c" in flags and "-o" in flags:
        return compile_object(compiler, version, Path(objects), flags)
    return os.execv(compiler, [compiler, *flags])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
