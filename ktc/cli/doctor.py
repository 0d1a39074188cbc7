"""`ktc doctor`: the parts of this machine that work for ktc, the parts that are missing, and the remedies.

The command raises no error: each finding is a row with its state, the fact and the remedy. It changes nothing, except
that `--clean` removes what killed processes left.
"""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ktc.cli.amounts import count, size
from ktc.cli.options import AUTO
from ktc.cli.session import Session
from ktc.cli.session_options import in_session
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import versions
from ktc.foundation.environment import cache_dir

if TYPE_CHECKING:
    from ktc.foundation.host import Gpu, Host

State = Literal["works", "limited", "missing"]

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_OLDEST_COMPILER = 11  # the first g++ with all of C++20 that the headers use; it also knows AVX512-BF16 and AMX


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table. `remedy` is empty if no action is needed."""

    name: str
    state: State
    found: str
    remedy: str = ""


def examine() -> tuple[Host, tuple[Finding, ...]]:
    """Return this machine and all findings about it, the most important first."""
    from ktc.foundation.host import detect

    host = detect(probe_gpu=versions.installed("torch") is not None)
    findings = (
        _instruction_set(host),
        _compiler(host),
        _python_header(),
        *(_package(name) for name in versions.SUPPORTED),
        _linears(),
        _gpus(host),
        Finding("memory", "works", size(host.memory)),
        _rates(host),
        _huge_pages(),
        _cache(),
        _compiled(),
        _leftovers(),
    )
    return host, findings


def to_json(host: Host, findings: tuple[Finding, ...]) -> dict[str, object]:
    """Return the object that `ktc doctor --json` prints."""
    facts = asdict(host)
    facts["features"] = sorted(host.features)
    return {"host": facts, "findings": [asdict(finding) for finding in findings]}


def _instruction_set(host: Host) -> Finding:
    facts = f"{', '.join(host.isas)}; {host.cores} cores, {host.threads} threads, {count(host.numa, 'NUMA node')}"
    if host.isas == ("scalar",):
        return Finding("instruction set", "limited", facts, "kernels are fast from AVX2 on: use a newer CPU")
    return Finding("instruction set", "works", facts)


def _compiler(host: Host) -> Finding:
    remedy = "install g++ 11 or newer (Debian, Ubuntu: `apt install g++`; Fedora: `dnf install gcc-c++`)"
    if host.compiler is None:
        return Finding("C++ compiler", "missing", "not found on PATH", remedy)
    fact = f"{host.compiler.path} {host.compiler.version}"
    major = versions.release(host.compiler.version)[:1]
    too_old = "clang" not in host.compiler.path and major < (_OLDEST_COMPILER,)
    return Finding("C++ compiler", "limited" if too_old else "works", fact, remedy if too_old else "")


def _python_header() -> Finding:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.is_file():
        return Finding("Python.h", "works", str(header))
    remedy = "install Python's headers (Debian, Ubuntu: `apt install python3-dev`; Fedora: `dnf install python3-devel`)"
    return Finding("Python.h", "missing", f"no {header}", remedy)


def _package(name: str) -> Finding:
    oldest, newest = versions.SUPPORTED[name]
    version, supported = versions.installed(name), versions.range_of(name)
    if version is None:
        index = " --index-url https://download.pytorch.org/whl/cpu (without a GPU)" if name == "torch" else ""
        return Finding(name, "missing", "not installed", f"`pip install '{name}>={versions.dotted(oldest)}'`{index}")
    if not oldest <= versions.release(version)[:2] <= newest:
        remedy = f"`pip install '{name}~={versions.dotted(newest)}'`"
        return Finding(name, "limited", f"{version}, supported are {supported}", remedy)
    return Finding(name, "works", f"{version} (supported: {supported})")


def _linears() -> Finding:
    """Measure torch's products in bf16 and in fp32, about 0.2 s of one thread."""
    name = "linear layers"
    if versions.installed("torch") is None:
        return Finding(name, "limited", "not measured without torch")
    from ktc.model.linears.choice import predicted_choice

    choice = predicted_choice()
    taken = "ktc's own product" if choice.packed else "torch's product"
    speeds = f"bf16 {choice.torch:.0f}, fp32 {choice.other:.0f} GFLOP/s"
    return Finding(name, "works", f"{taken} in `kt_linear(prefill = auto)` on the CPU: torch has {speeds}")


def _gpus(host: Host) -> Finding:
    if not host.gpus:
        return Finding("GPU", "limited", "none: everything runs on the CPU", "an NVIDIA GPU and a CUDA build of torch")
    return Finding("GPU", "works", ", ".join(map(_described, host.gpus)))


def _described(gpu: Gpu) -> str:
    taken = f", about {size(gpu.taken)} of it used by other programs" if gpu.taken else ""
    return f"{gpu.name} {size(gpu.memory)}{taken}"


def _rates(host: Host) -> Finding:
    from ktc.foundation.measured_host import MEASURE, known_host, measured_path

    known = known_host(host)
    again = f"`{MEASURE}` measures this machine, in about half a minute"
    if known.stale is not None:
        return Finding("rates", "limited", f"stale: {known.stale.message}", again)
    if known.measurement is None:
        return Finding("rates", "limited", "assumed, as usual of such a processor and cards", again)
    fact = f"measured on {known.measurement.when} ({measured_path()})"
    if known.measurement.busy:
        return Finding("rates", "limited", f"{fact}, while the machine was busy", again)
    return Finding("rates", "works", fact)


def _huge_pages() -> Finding:
    try:
        mode = re.search(r"\[(\w+)\]", _HUGE_PAGES.read_text(encoding="utf-8"))
    except OSError:
        mode = None
    remedy = f"`echo madvise | sudo tee {_HUGE_PAGES}` makes reading the experts faster"
    if mode is None:
        return Finding("huge pages", "limited", "unknown: the kernel does not report it", remedy)
    if mode[1] == "never":
        return Finding("huge pages", "limited", "never", remedy)
    return Finding("huge pages", "works", mode[1])


def _cache() -> Finding:
    folder = cache_dir()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        remedy = "set KTC_CACHE_DIR to a writable folder"
        return Finding("cache folder", "missing", f"{folder} cannot be written", remedy)
    return Finding("cache folder", "works", f"{folder}, {size(shutil.disk_usage(existing).free)} free")


def _compiled() -> Finding:
    """Count the compiled models that `ktc train`, `generate` and `serve` keep in the cache."""
    folder = cache_dir() / "compiled"
    models = [path.parent for path in folder.glob("*/ktc.json")]
    total = sum(file.lstat().st_size for model in models for file in model.rglob("*") if file.is_file())
    fact = f"{len(models)} in the cache, {total / 1e6:,.1f} MB" if models else "none in the cache"
    return Finding("compiled models", "works", fact, f"`rm -r {folder}` frees the space" if total > 1 << 30 else "")


def _leftovers() -> Finding:
    """Count what killed processes left in the cache, among the temporary files and in the working folder."""
    from ktc.cli import leftovers

    unfinished = leftovers.find()
    if not unfinished:
        return Finding("leftovers", "works", "none of killed processes")
    total = sum(leftover.bytes for leftover in unfinished) / 1e6
    fact = f"{len(unfinished)} of killed processes, {total:,.1f} MB"
    return Finding("leftovers", "limited", fact, "`ktc doctor --clean` removes them")


@in_session("as_json", "quiet")
def doctor_command(
    session: Session,
    clean: Annotated[
        bool,
        typer.Option("--clean", help="List and remove what killed processes left in caches and temporary folders."),
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the rates of this machine, which plans are made from.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--host", "-o", metavar="FILE", help="Write the measured rates to this file.")
    ] = None,
) -> None:
    """Show which parts of this machine work for ktc, which are missing, and how to install them."""
    if clean:
        _clean(session)
        return
    if output is not None and not measure:
        raise InputRefused(Diagnostic("U001", "`--host` is the file of `--measure`", hint="add `--measure`"))
    if measure:
        from ktc.cli import measuring

        measuring.measure(session, output)
        return
    from ktc.cli.tables import findings_table

    here, findings = examine()
    session.show(findings_table(findings, {"missing": "MISSING"}))
    session.result(to_json(here, findings))
    session.exit_code = 3 if any(finding.state == "missing" for finding in findings) else 0
    session.next("ktc", "check", AUTO, "tiny:qwen3_moe")


def _clean(session: Session) -> None:
    """Remove leftovers, with a line for each. Those that cannot be removed make the exit code 3."""
    from ktc.cli import leftovers

    rows: list[dict[str, object]] = []
    removed: list[leftovers.Leftover] = []
    for left in leftovers.find():
        is_removed = leftovers.remove(left)
        removed += [left] if is_removed else []
        rows.append({"path": str(left.path), "bytes": left.bytes, "removed": is_removed})
        session.show(f"{'removed' if is_removed else 'cannot remove'} {left.path} ({left.bytes / 1e6:,.1f} MB)")
    session.show(f"{len(removed)} leftovers removed, {sum(left.bytes for left in removed) / 1e6:,.1f} MB")
    session.result({"leftovers": rows})
    session.exit_code = 0 if len(removed) == len(rows) else 3
