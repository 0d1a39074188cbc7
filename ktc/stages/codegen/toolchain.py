"""The C++ compiler of codegen: its requirements, its flags for each instruction set, and its calls.

Refused, before anything runs: no compiler, no Python headers, an instruction set that the host lacks or that this
machine could not test.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pybind11

from ktc.diagnostics import Diagnostic, HostLacks, KtcError
from ktc.foundation import resources
from ktc.foundation.host import Compiler, Host
from ktc.foundation.isa import INSTRUCTION_SETS, Isa
from ktc.foundation.machine_faults import fault_in_text, not_written_whole
from ktc.model.kernels.kernel_library import interface_digest

# The code is computed as written: no fast math, and a * b + c is one operation only where the source requests it. By
# default GCC contracts it in C++, also across statements, and the bits would depend on its inlining.
_BASE_FLAGS: Final = (
    "-std=c++20", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wno-psabi", "-Wno-attributes",
)  # fmt: skip
# Of GCC alone. Unique symbols are off so that two loaded libraries never share a variable. GCC 12 passes a struct by
# value, finds that the callee writes no memory, and leaves the struct out of the next call that takes it, although
# other calls have written over that stack since. With AVX-512 kernels then read garbage
# (`tests/stages/codegen/by_value.cpp`), at every level of optimisation. So GCC does not search for such callees.
_GCC_FLAGS: Final = ("-fno-gnu-unique", "-fno-ipa-pure-const")
_MAX_REPORTED_LINES: Final = 20
_UNWRITTEN: Final = re.compile(r"error (?:writing|closing) ")  # of GCC, which may name another error than the system's
# Of a process that the driver starts.
_ENDED: Final = re.compile(r"signal terminated program|terminated with signal|out of memory allocating")


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A compiler and the headers a kernel library needs."""

    compiler: Compiler
    include: tuple[Path, ...]

    def compile_command(self, source: Path, target: Path, isa: Isa) -> tuple[str, ...]:
        includes = (f"-I{folder}" for folder in self.include)
        return (self.compiler.path, *self.flags(isa, source.name), *includes, "-c", str(source), "-o", str(target))

    def link_command(self, objects: Iterable[Path], target: Path) -> tuple[str, ...]:
        """Return the command that links a library.

        `$CXX` may name a driver of C, which compiles C++ and leaves out its library: PEFT's BOFT sets `CXX=gcc` where
        its own extension cannot be built, and does not set it back.
        """
        libraries = () if "++" in Path(self.compiler.path).name else ("-lstdc++", "-lm")
        return (self.compiler.path, "-shared", "-pthread", *map(str, objects), "-o", str(target), *libraries)

    def flags(self, isa: Isa, unit: str) -> tuple[str, ...]:
        """Flags of one translation unit. The Python modules have no loop: a short build matters more there."""
        optimise = "-O1" if unit.endswith("module.cpp") else "-O3"
        gcc = () if "clang" in Path(self.compiler.path).name else _GCC_FLAGS
        interface = (f'-DKTC_INTERFACE="{interface_digest()}"',) if unit == "module.cpp" else ()
        return (*_BASE_FLAGS, *gcc, optimise, *interface, *INSTRUCTION_SETS[isa].compiler)


def find(host: Host) -> Toolchain:
    """Return the host's toolchain. Raises `HostLacks` (H221 no compiler, H222 no Python.h)."""
    if host.compiler is None:
        message = "no C++ compiler found: looked for `$CXX`, `g++`, `c++` and `clang++`"
        hint = "install `g++` (Debian and Ubuntu: `apt install build-essential`; Fedora: `dnf install gcc-c++`)"
        raise HostLacks(Diagnostic("H221", message, hint=hint))
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").is_file():
        message = f"`Python.h` is not in `{python}`, and the kernels are a Python extension"
        raise HostLacks(Diagnostic("H222", message, hint="install `python3-dev` (Fedora: `python3-devel`)"))
    ours = (resources.runtime_include(), resources.runtime_bindings())
    return Toolchain(host.compiler, (*ours, Path(pybind11.get_include()), python))


def require_isas(isas: Iterable[Isa], host: Host) -> None:
    """Raise `HostLacks` (H223) for each instruction set that this host cannot run."""
    usable = ", ".join(f"`{isa}`" for isa in host.isas)
    _refuse_lacking(isas, host, "H223", "this machine cannot run `{}` kernels", f"usable here: {usable}; see `--isa`")


def require_testable(isas: Iterable[Isa], here: Host) -> None:
    """Raise `HostLacks` (H227) for each instruction set that `here`, the machine that compiles, cannot run itself."""
    message = "this machine cannot run `{}` kernels itself, and no kernel is handed out that was not tested"
    hint = "compile on the machine that the host file describes; `ktc check` shows the plan for it anywhere"
    _refuse_lacking(isas, here, "H227", message, hint)


def _refuse_lacking(isas: Iterable[Isa], host: Host, code: str, message: str, hint: str) -> None:
    lacking = sorted(set(isas) - set(host.isas))
    if lacking:
        raise HostLacks(*(Diagnostic(code, message.format(isa), hint=hint) for isa in lacking))


def run(command: tuple[str, ...]) -> None:
    """Run the compiler.

    Raises `HostLacks` if that is impossible (H221), if it cannot write (H226) or was ended (H228), and `KtcError` with
    its first lines if it failed (H224).
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        message = f"the C++ compiler `{command[0]}` cannot be run any more: {error.strerror}"
        hint = "install `g++`, or name another compiler with `CXX`"
        raise HostLacks(Diagnostic("H221", message, hint=hint)) from error
    if done.returncode == 0:
        return
    fault = fault_in_text(done.stderr) or (not_written_whole() if _UNWRITTEN.search(done.stderr) else None)
    if fault is not None:
        message = f"the C++ compiler could not write to the kernel cache or the temporary folder: {fault.words}"
        hint = f"{fault.remedy}, or name other folders: `KTC_CACHE_DIR`, `TMPDIR`"
        raise HostLacks(Diagnostic("H226", message, hint=hint))
    if done.returncode < 0 or _ENDED.search(done.stderr):
        message = "the C++ compiler was ended by the system, which has too little memory or a user who ended it"
        raise HostLacks(Diagnostic("H228", message, hint="end other programs, or allow this process more memory"))
    said = "\n".join(done.stderr.splitlines()[:_MAX_REPORTED_LINES])
    raise KtcError(Diagnostic("H224", f"`{Path(command[0]).name}` failed with status {done.returncode}:\n{said}"))
