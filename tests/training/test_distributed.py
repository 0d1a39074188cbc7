"""Several processes are one: losses and adapter of a run under torchrun are those of one process with its batches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from safetensors.torch import load_file
from torch import Tensor

SCRIPT = Path(__file__).with_name("data_parallel.py")


@pytest.fixture(scope="module")
def out(compiled_twin: Callable[..., Path]) -> Path:
    return compiled_twin("tiny:qwen3_moe", "moe-experts-lora")


def start(out: Path, folder: Path, world: int, *, steps: int = 3, **job: Any) -> subprocess.CompletedProcess[str]:
    """Runs `data_parallel.py` in `world` processes, alone without torchrun."""
    folder.mkdir(exist_ok=True)
    told = json.dumps({"out": str(out), "folder": str(folder), "world": world, "steps": steps, **job})
    return torchrun(world, str(SCRIPT), told)


def torchrun(world: int, *program: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"] if world > 1 else []
    command = [sys.executable, *launcher, *program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


def losses(folder: Path, rank: int = 0) -> list[float]:
    return json.loads((folder / f"losses-{rank}.json").read_text())


def tensors(folder: Path, when: str, rank: int = 0) -> dict[str, Tensor]:
    return load_file(folder / f"{when}-{rank}.safetensors")


def equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


@pytest.fixture(scope="module")
def alone(out: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, with the batches of all."""
    folder = tmp_path_factory.mktemp("alone")
    done = start(out, folder, 1)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_train_as_one_does(out: Path, alone: Path, tmp_path: Path, world: int) -> None:
    done = start(out, tmp_path, world)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path) == pytest.approx(losses(alone), abs=1e-6)
    assert not equal(tensors(tmp_path, "before", 0), tensors(tmp_path, "before", 1)), "each drew its own adapter"
    assert equal(tensors(tmp_path, "before", 0), tensors(alone, "before"))
    after = tensors(tmp_path, "after", 0)
    assert all(equal(tensors(tmp_path, "after", rank), after) for rank in range(1, world))
    for name, expected in tensors(alone, "after").items():
        # by norm: where a gradient is almost nothing, Adam makes a step of its rounding
        assert (after[name] - expected).norm() <= 1e-3 * expected.norm(), name
    for rank in range(world):
        averaged = json.loads((tmp_path / f"averaged-{rank}.json").read_text())
        assert averaged == {"0": [(world + 1) / 2] * 3, "2": [3 / world] * 3}, (
            "a gradient of some counts as zero in the rest"
        )


@pytest.mark.slow
def test_a_killed_process_ends_the_run_by_name_and_the_last_checkpoint_resumes(
    out: Path, alone: Path, tmp_path: Path
) -> None:
    killed = start(out, tmp_path, 2, save=True, fate="kill", until=2)
    assert killed.returncode != 0
    assert "T534: this " in killed.stderr
    assert re.search(r"rank 1 did not arrive|rank +: 1 ", killed.stderr), "by the other process, or by torchrun"
    assert "checkpoint-2" in killed.stderr
    resumed = start(out, tmp_path, 2, save=True, resume=str(tmp_path / "run" / "checkpoint-2"))
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert losses(tmp_path) == pytest.approx(losses(alone), abs=1e-6)


@pytest.mark.slow
def test_an_error_in_one_process_is_told_by_the_others(out: Path, tmp_path: Path) -> None:
    failed = start(out, tmp_path, 2, fate="error", until=1)
    assert failed.returncode != 0
    assert "rank 1 stopped with OSError: the disk is full" in failed.stderr


@pytest.mark.slow
def test_processes_that_train_different_parameters_are_refused(out: Path, tmp_path: Path) -> None:
    refused = start(out, tmp_path, 2, unlike=True)
    assert refused.returncode != 0
    assert "T533: the processes train different parameters: `rank 1` differ from rank 0" in refused.stderr


@pytest.mark.slow
def test_ktc_train_runs_under_torchrun_and_one_process_speaks(out: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"say {i} ", "completion": "yes well"}) for i in range(16)))
    told = ["train", str(out), "--data", str(data), "-o", str(tmp_path / "run"), "--max-steps", "2", "--json"]
    done = torchrun(2, "-m", "ktc", *told)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["report"]["processes"] == 2
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
