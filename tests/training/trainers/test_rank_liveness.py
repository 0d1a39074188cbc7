"""A process that dies inside a collective ends the run of the others with one message."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from forks import in_a_child

from ktc.diagnostics import KtcError
from ktc.training.trainers.rank_liveness import RankLiveness, together


def meet(store: Path, said: Path) -> None:
    """Be two processes, of which one dies; the other writes what its errors are."""
    rank = int(os.fork() == 0)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    dist.all_reduce(torch.zeros(1))
    call = RankLiveness()
    call.arrive()
    if rank == 1:
        os._exit(9)
    os.wait()
    lines: list[str] = []
    for body in fail, lambda: dist.all_reduce(torch.zeros(1)):
        try:
            with together(call, None):
                body()
        except KtcError as error:
            lines.append(f"{error.diagnostics[0].code} {error.diagnostics[0].message}")
        except RuntimeError as error:
            lines.append(f"RuntimeError {error}")
    said.write_text("\n".join(lines))


def fail() -> None:
    raise RuntimeError("of its own")


def test_a_process_that_died_inside_a_collective_is_no_error_of_the_others(tmp_path: Path) -> None:
    assert in_a_child(lambda: meet(tmp_path / "store", tmp_path / "said")) == 0
    said = (tmp_path / "said").read_text().splitlines()
    assert said[0] == "RuntimeError of its own"
    assert said[1].startswith("T534 a run continues in all of its processes or in none: a collective failed with: ")
