"""This machine with the rates that `ktc doctor --measure` wrote, as long as it is the machine that was measured.

In: the file of measurements, if there is one. Out: a `Host`, and where the file does not fit a warning among its notes
(H206 another machine, H207 an invalid file). The usual rates of the machine are used then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import environment, versions
from ktc.foundation.host import Gpu, Host, detect
from ktc.foundation.host_file import HostFile, Measurement, read_file

MEASURE: Final = "ktc doctor --measure"
_MEMORY_TOLERANCE: Final = 0.05  # of a machine's memory: kernels and firmware reserve more or less of it


@dataclass(frozen=True, slots=True)
class Known:
    """This machine, and its measurement, None where there is none that fits. `stale` says why one does not."""

    host: Host
    measurement: Measurement | None = None
    stale: Diagnostic | None = None


def measured_path() -> Path:
    """Return the file that `ktc doctor --measure` writes and that plans are made from."""
    return environment.config_dir() / "host.toml"


def this_host() -> Host:
    """Return this machine with its GPUs and its rates; under torchrun, the part of it that each process has.

    Its notes say where a measurement does not fit it.
    """
    known = known_host(detect(probe_gpu=True))
    notes = (*(() if known.stale is None else (known.stale,)), *_of_others(known.host.gpus))
    host, processes = replace(known.host, notes=notes), environment.local_world_size()
    return host if processes == 1 else host.part(processes)


def _of_others(gpus: Sequence[Gpu]) -> Iterator[Diagnostic]:
    """Yield a warning for each GPU that other programs use."""
    for number, gpu in enumerate(gpus):
        if gpu.taken:
            taken, memory = (f"{size / 2**30:,.1f} GiB" for size in (gpu.taken, gpu.memory))
            message = f"other programs use about {taken} of the {memory} of cuda:{number} ({gpu.name})"
            hint = f"the plan uses what is free; end them first, or set a budget: `plan {{ cuda:{number} = SIZE }}`"
            yield Diagnostic("H212", message, hint=hint, severity="warning")


def known_host(here: Host, path: Path | None = None) -> Known:
    """Return the machine `here` with its measured rates, if the file has those of it."""
    path = path or measured_path()
    if not path.exists():
        return Known(here)
    hint = f"`{MEASURE}` measures it again; until then plans use usual rates"
    try:
        file = read_file(path)
    except InputRefused as error:
        message = f"the measured rates in `{path}` cannot be used: {error.diagnostics[0].message}"
        return Known(here, stale=Diagnostic("H207", message, error.diagnostics[0].span, hint=hint, severity="warning"))
    if changed := next(differences(file, here), None):
        message = f"the measured rates in `{path}` are not of this machine as it is now: {changed}"
        return Known(here, stale=Diagnostic("H206", message, hint=hint, severity="warning"))
    return Known(replace(here, described=file.host.described), file.measurement)


def differences(file: HostFile, here: Host) -> Iterator[str]:
    """Yield each fact that differs between a measured machine and this one."""
    then = file.host
    if file.measurement is None:
        yield "the file is of a machine that was described, not measured"
        return
    facts = (
        ("processor", then.processor, here.processor),
        ("instruction set", then.isas[0], here.isas[0]),
        ("cores", then.cores, here.cores),
        ("threads", then.threads, here.threads),
        ("NUMA nodes", then.numa, here.numa),
        ("GPUs", _names(then), _names(here)),
        ("ktc", file.measurement.ktc, versions.__version__),
    )
    for what, before, now in facts:
        if before != now:
            yield f"{what} `{before}` then, `{now}` now"
    if abs(then.memory - here.memory) > _MEMORY_TOLERANCE * here.memory:
        yield f"{then.memory / 1e9:,.0f} GB of memory then, {here.memory / 1e9:,.0f} GB now"


def _names(host: Host) -> str:
    return ", ".join(gpu.name for gpu in host.gpus) or "none"
