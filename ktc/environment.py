"""The environment variables that ktc reads and sets, each with its meaning. `NO_COLOR` and OpenMP's are `cli`'s."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def cxx() -> str | None:
    """The C++ compiler that the user wants: `$CXX`."""
    return os.environ.get("CXX")


def cache_dir() -> Path:
    """Where built kernels and `tiny:` models lie: `$KTC_CACHE_DIR`, `$XDG_CACHE_HOME/ktc` or `~/.cache/ktc`."""
    if own := os.environ.get("KTC_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ktc"


def local_world_size() -> int:
    """How many processes of one torchrun share this machine (1 without torchrun)."""
    return _number("LOCAL_WORLD_SIZE")


def world_size() -> int:
    """How many processes the torchrun has that started this one (1 without torchrun)."""
    return _number("WORLD_SIZE")


def asked_processes() -> int:
    """How many processes LLaMA-Factory's launcher would start: `NPROC_PER_NODE` on each of `NNODES`."""
    return _number("NPROC_PER_NODE") * _number("NNODES")


def _number(variable: str) -> int:
    value = os.environ.get(variable, "1")
    return max(1, int(value)) if value.isdigit() else 1


# `USE_KT`: the one switch for programs of others that run a compiled model


def use_kt() -> bool:
    """Whether `USE_KT` is on: `1`, `true` or `y`, as LLaMA-Factory reads it."""
    return os.environ.get("USE_KT", "0").lower() in ("1", "true", "y")


def switch_on_kt() -> None:
    """As if this process had been started under `USE_KT=1`."""
    os.environ["USE_KT"] = "1"


def apply_use_kt() -> None:
    """Under `USE_KT=1` accelerate shall not judge the device map of a compiled model: called where one is loaded.

    It refuses a map of several devices in a process group, and would tell DDP to move the model to one. What the user
    has set himself stays.
    """
    if use_kt():
        os.environ.setdefault("ACCELERATE_BYPASS_DEVICE_MAP", "true")


def join_world_of_one() -> None:
    """Outside torchrun: what torchrun tells the one process of `--nproc-per-node 1`.

    In a process group transformers counts one GPU per process and wraps nothing in DataParallel, however many it sees.
    """
    if "WORLD_SIZE" in os.environ:
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


def process_rank() -> int:
    """Which of the processes that torchrun started this one is, over all machines; 0 without it."""
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0
