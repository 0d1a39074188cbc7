"""KernelSource to KernelLibrary, through a cache whose key covers all inputs of the build.

In: rendered text, the host. Out: a library whose every kernel passed its self-test. Refused: all refusals of
`toolchain`, text that does not compile, a wrong kernel. A folder of the cache is complete once it holds `library.json`.
Builders of the same key wait for one another, and the next one removes the remains of a killed one. Libraries share the
objects of equal units, which stay in the cache: a model that is compiled for another use compiles what is new.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import shutil
import sysconfig
import time
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import pybind11
from filelock import FileLock

from ktc.diagnostics import Diagnostic, HostLacks, KtcError
from ktc.foundation import environment, resources
from ktc.foundation import host as hosts
from ktc.foundation.files import file_digest, folder_beside, replaced_file, write_file
from ktc.foundation.host import Host
from ktc.foundation.isa import Isa
from ktc.foundation.regular_files import read_regular
from ktc.foundation.stage_progress import counted
from ktc.model.kernels.kernel_library import KernelLibrary
from ktc.stages.codegen import toolchain
from ktc.stages.codegen.kinds import kind_of
from ktc.stages.codegen.render import KernelSource, TranslationUnit
from ktc.stages.codegen.toolchain import Toolchain

_RECORD: Final = "library.json"
_OBJECTS: Final = "objects"  # a folder beside the libraries
_KEPT_DAYS: Final = 30  # of objects that no build takes


def build(source: KernelSource, host: Host, cache_dir: Path | None = None) -> KernelLibrary:
    """Return the library of these kernels, cached or built now. The default `cache_dir` is `kernels` under ktc's cache.

    `host` may be a described machine. The kernels are tested on this machine, which must be able to run them.

    Raises `HostLacks` (H221-H223 and H227 of `toolchain`, H226 the cache cannot be written, H228 too little memory) and
    `KtcError` (H224 the compiler failed, H225 a kernel is wrong).
    """
    isas: set[Isa] = {unit.isa for unit in source.units}
    toolchain.require_isas(isas, host)
    toolchain.require_testable(isas, hosts.detect())
    tools = toolchain.find(host)
    cache = cache_dir or environment.cache_dir() / "kernels"
    folder = cache / cache_key(source, tools)
    if library := _cached(folder):
        return library
    lock = FileLock(folder.with_suffix(".lock"))
    with _written(cache):
        cache.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        return _cached(folder) or _build(source, tools, folder, host.threads)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        message = "there is too little memory to build and test the kernels"
        hint = "end other programs, or allow this process more memory"
        raise HostLacks(Diagnostic("H228", message, hint=hint)) from error
    finally:
        lock.release()


@contextlib.contextmanager
def _written(cache: Path) -> Generator[None]:
    """Report an OSError inside as a fault of the cache (H226)."""
    try:
        yield
    except OSError as error:
        hint = "free some space, or name another folder with `KTC_CACHE_DIR`"
        if error.errno == errno.ENOMEM:
            raise
        raise HostLacks(Diagnostic("H226", f"cannot write the kernel cache `{cache}`: {error}", hint=hint)) from error


def cache_key(source: KernelSource, tools: Toolchain) -> str:
    """Return a digest of all inputs of the library: code, flags, headers, compiler, pybind11 and the Python ABI.

    The rule that requests a kernel is not an input, so an edit of the program around its kernels rebuilds nothing.
    """
    return _digest((*_tools(tools), *itertools.chain.from_iterable(_unit(unit, tools) for unit in source.units)))


def _digest(items: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(len(item).to_bytes(8, "little"))
        digest.update(item)
    return digest.hexdigest()[:32]


def _unit(unit: TranslationUnit, tools: Toolchain) -> Iterator[bytes]:
    yield from (part.encode() for part in (unit.name, unit.code, *tools.flags(unit.isa, unit.name)))


def _tools(tools: Toolchain) -> Iterator[bytes]:
    yield from (str(part).encode() for part in (*asdict(tools.compiler).values(), pybind11.__version__, _abi()))
    for include in (resources.runtime_include(), resources.runtime_bindings()):
        for header in sorted(include.rglob("*.hpp")):
            yield str(header.relative_to(include)).encode()
            yield header.read_bytes()


def _abi() -> str:
    return str(sysconfig.get_config_var("SOABI"))


def _cached(folder: Path) -> KernelLibrary | None:
    """Return the library in this folder if it is complete and unaltered."""
    record = folder / _RECORD
    if not record.is_file():
        return None
    entry: dict[str, Any] = json.loads(read_regular(record).decode())
    if "builds" not in entry:  # an earlier version of ktc wrote it
        return None
    entries, builds = (tuple((name, of) for name, of in entry[key]) for key in ("entries", "builds"))
    library = KernelLibrary(folder / entry["file"], entry["digest"], entries, builds)
    return library if library.path.is_file() and file_digest(library.path) == library.digest else None


def _build(source: KernelSource, tools: Toolchain, folder: Path, jobs: int) -> KernelLibrary:
    shutil.rmtree(folder, ignore_errors=True)  # an altered library, or one whose builder was killed
    try:
        with _written(folder.parent), folder_beside(folder) as work:
            built = _compile(source, tools, work, jobs, folder.parent / _OBJECTS)
            work.rename(folder)
        digest = file_digest(folder / built.name)
        library = KernelLibrary(folder / built.name, digest, source.entries, _builds(source, tools))
        try:
            for spec in source.specs:
                kind_of(spec).self_test(library.kernel(spec.entry), spec)
        except KtcError:  # the fault may be in an object
            for key in _object_keys(source, tools):
                for item in (folder.parent / _OBJECTS).glob(f"{key}.*.o"):
                    item.unlink(missing_ok=True)
            raise
        with _written(folder.parent):
            _write_record(folder, library)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return library


def _object_keys(source: KernelSource, tools: Toolchain) -> list[str]:
    """Return a digest of all inputs of each unit's object."""
    shared = tuple(_tools(tools))
    return [_digest((*shared, *_unit(unit, tools))) for unit in source.units]


def _builds(source: KernelSource, tools: Toolchain) -> tuple[tuple[str, str], ...]:
    """Return each entry that has a unit of its own with the digest of all inputs of its object."""
    keys = dict(zip((unit.name for unit in source.units), _object_keys(source, tools), strict=True))
    return tuple((entry, keys[f"{entry}.cpp"]) for entry, _ in source.entries if f"{entry}.cpp" in keys)


def _compile(source: KernelSource, tools: Toolchain, work: Path, jobs: int, kept: Path) -> Path:
    """Compile each unit with the flags of its instruction set, but those whose objects are `kept`, and link them."""
    for unit in source.units:
        (work / unit.name).write_text(unit.text, encoding="utf-8")

    def compiled(unit: TranslationUnit, key: str) -> Path:
        made = (work / unit.name).with_suffix(".o")
        if _copied(kept, key, made):
            return made
        toolchain.run(tools.compile_command(work / unit.name, made, unit.isa))
        with replaced_file(kept / f"{key}.{file_digest(made)}.o") as draft:
            shutil.copyfile(made, draft)
        return made

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        units = zip(source.units, _object_keys(source, tools), strict=True)
        compilations = [pool.submit(compiled, unit, key) for unit, key in units]
        for done in counted(as_completed(compilations), len(compilations)):
            done.result()
    objects = [done.result() for done in compilations]
    library = work / f"ktc_kernels.{_abi()}.so"
    toolchain.run(tools.link_command(objects, library))
    for item in objects:
        item.unlink()
    _remove_unused(kept)
    return library


def _copied(kept: Path, key: str, target: Path) -> bool:
    """Copy the kept object of a key to `target`; return whether there was a whole one."""
    for item in kept.glob(f"{key}.*.o"):
        with contextlib.suppress(FileNotFoundError):  # another builder removed it
            item.touch()
            shutil.copyfile(item, target)
            if file_digest(target) == item.name.split(".")[1]:
                return True
    return False


def _remove_unused(kept: Path) -> None:
    oldest = time.time() - _KEPT_DAYS * 86400
    for item in kept.glob("*.o"):
        with contextlib.suppress(FileNotFoundError):
            if item.stat().st_mtime < oldest:
                item.unlink()


def _write_record(folder: Path, library: KernelLibrary) -> None:
    entry = {"file": library.path.name, "digest": library.digest, "entries": library.entries, "builds": library.builds}
    write_file(folder / _RECORD, json.dumps(entry, indent=1) + "\n")
