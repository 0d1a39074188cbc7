"""A process that dies inside a collective ends the run of the others with one message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_MEETING = """
import os, sys, torch
import torch.distributed as dist
from ktc.diagnostics import KtcError
from ktc.training.trainers.roll_call import RollCall, together
rank = int(os.fork() == 0)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
dist.all_reduce(torch.zeros(1))
call = RollCall()
call.arrive()
if rank == 1:
    os._exit(9)
os.wait()
def fail():
    raise RuntimeError("of its own")
for body in fail, lambda: dist.all_reduce(torch.zeros(1)):
    try:
        with together(call, None):
            body()
    except KtcError as error:
        print(error.diagnostics[0].code, error.diagnostics[0].message)
    except RuntimeError as error:
        print("RuntimeError", error)
"""


def test_a_process_that_died_inside_a_collective_is_no_error_of_the_others(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _MEETING, str(tmp_path / "store")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.splitlines()
    assert said[0] == "RuntimeError of its own"
    assert said[1].startswith("T534 a run continues in all of its processes or in none: a collective failed with: ")
