"""The environment variables that ktc reads and sets, with their meanings. `cli` handles `NO_COLOR`."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

from ktc.diagnostics import Diagnostic, InputRefused


def cxx() -> str | None:
    """Return the user's C++ compiler: `$CXX`."""
    return os.environ.get("CXX")


def cache_dir() -> Path:
    """Return the cache of kernels and `tiny:` models: `$KTC_CACHE_DIR`, `$XDG_CACHE_HOME/ktc` or `~/.cache/ktc`."""
    if folder := os.environ.get("KTC_CACHE_DIR"):
        return Path(folder).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ktc"


def small_model(folder: Path) -> str:
    """Return NAME of the folder of `tiny:NAME`, and "" for any other folder."""
    return folder.name.partition("-")[0] if folder.parent == cache_dir() / "models" else ""


def config_dir() -> Path:
    """Return the folder of the user's settings of ktc: `$XDG_CONFIG_HOME/ktc` or `~/.config/ktc`."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "ktc"


def local_world_size() -> int:
    """Return the number of processes of one torchrun on this machine (1 without torchrun)."""
    return _number("LOCAL_WORLD_SIZE")


def local_rank() -> int:
    """Return the rank of this process among those of one torchrun on this machine; 0 without it."""
    return _number("LOCAL_RANK", 0)


def world_size() -> int:
    """Return the number of processes of the current torchrun (1 without torchrun)."""
    return _number("WORLD_SIZE")


def is_in_world() -> bool:
    """Return whether a launcher started this process, also as the only one (`torchrun --nproc-per-node 1`)."""
    return "WORLD_SIZE" in os.environ


def asked_processes() -> int:
    """Return the number of processes that LLaMA-Factory's launcher would start: `NPROC_PER_NODE` times `NNODES`."""
    return _number("NPROC_PER_NODE") * _number("NNODES")


def _number(variable: str, least: int = 1) -> int:
    value = os.environ.get(variable, "")
    return max(least, int(value)) if value.isdecimal() else least


MOST_THREADS: Final = 4096
"""Of PyTorch, a rule, a host file, and an engine of kernels (`kMostThreads`): a larger number is a mistake."""


def require_sane_threads() -> None:
    """Raise `InputRefused` (H232) where `OMP_NUM_THREADS` names more threads than `MOST_THREADS`. Before torch."""
    threads = os.environ.get("OMP_NUM_THREADS", "").strip()  # one number for each level of nesting
    numbers = (number for number in threads.replace(" ", "").split(",") if number.isdecimal())
    if any(len(number) > 9 or int(number) > MOST_THREADS for number in numbers):
        message = f"`OMP_NUM_THREADS={threads}` is more than the {MOST_THREADS} threads that a process may have"
        hint = "unset it: PyTorch then has a thread for each core"
        raise InputRefused(Diagnostic("H232", message, hint=hint))


# How idle threads of PyTorch wait: its OpenMP runtime reads these variables when torch is imported. By default they
# spin for up to ten milliseconds after every operation, also on cores that another process needs.
_WAITS: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # GCC's, and LLVM's and Intel's own


def let_openmp_sleep() -> None:
    """Let idle threads sleep (`OMP_WAIT_POLICY=passive`), unless the user has set how they wait. Before torch."""
    if not any(name in os.environ for name in _WAITS):
        os.environ["OMP_WAIT_POLICY"] = "passive"


def openmp_spins() -> bool:
    """Return whether idle threads of PyTorch spin, if nothing changed since torch was imported."""
    policy, *spins = (os.environ.get(name, "").strip().lower() for name in _WAITS)
    return policy != "passive" and "0" not in spins


# `USE_KT`: the one switch for foreign programs that run a compiled model


def use_kt() -> bool:
    """Return whether `USE_KT` is on: `1`, `true` or `y`, as LLaMA-Factory reads it."""
    return os.environ.get("USE_KT", "0").lower() in ("1", "true", "y")


def switch_on_kt() -> None:
    os.environ["USE_KT"] = "1"


def apply_use_kt() -> None:
    """Disable accelerate's check of a compiled model's device map under `USE_KT=1`; called when a model is loaded.

    The check refuses a map of several devices in a process group, and DDP would move the model to one device. Variables
    that the user has set are kept.
    """
    if use_kt():
        os.environ.setdefault("ACCELERATE_BYPASS_DEVICE_MAP", "true")


def join_world_of_one() -> None:
    """Set torchrun's variables for a single process (`--nproc-per-node 1`), outside torchrun.

    In a process group, transformers counts one GPU per process and does not use DataParallel with several visible GPUs.
    """
    if "WORLD_SIZE" in os.environ:
        return
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=_free_port())


# The processes of one `ktc train`, which starts them itself
_STARTED: Final = "KTC_STARTED_FOR"
_REPORTS: Final = "KTC_STARTED_REPORTS"
STARTER_PIPE: Final = "KTC_STARTER_PIPE"
_OF_LAUNCHERS: Final = ("TORCHELASTIC_", "GROUP_", "ROLE_")


def started_for() -> Path | None:
    """Return the compiled model that `ktc train` has started this process for, beside others that share its steps."""
    folder = os.environ.get(_STARTED)
    return Path(folder) if folder else None


def reports_folder() -> Path | None:
    """Return the folder in which a process that `ktc train` has started leaves its diagnostics and result."""
    folder = os.environ.get(_REPORTS)
    return Path(folder) if folder else None


def starter_pipe() -> int | None:
    """Return the file descriptor of a pipe that ends with the `ktc train` that has started this process."""
    number = os.environ.get(STARTER_PIPE, "")
    return int(number) if number.isdecimal() else None


def of_processes(out: Path, count: int, threads: int, reports: Path) -> list[dict[str, str]]:
    """Return the environment of each process of `count` on this machine, as torchrun would set it."""
    before = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    shared = {
        **before, _STARTED: str(out.absolute()), _REPORTS: str(reports),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count), "TORCHELASTIC_RUN_ID": "ktc",
    }  # fmt: skip
    shared.setdefault("OMP_NUM_THREADS", str(threads))
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def process_rank() -> int:
    """Return the rank of this process among those of torchrun, over all machines; 0 without it."""
    return _number("RANK", 0)
