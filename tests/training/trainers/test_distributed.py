"""Several processes are one: losses and adapter of a run under torchrun are those of one process with its batches."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from places import ROOT
from safetensors.torch import load_file
from torch import Tensor

import ktc
from ktc.foundation import resources

SCRIPT = Path(__file__).with_name("data_parallel.py")


@pytest.fixture(scope="module")
def out(compiled_twin: Callable[..., Path]) -> Path:
    return compiled_twin("tiny:qwen3_moe", "moe-experts-lora")


def job(out: Path, folder: Path, world: int, *, steps: int = 3, **options: Any) -> dict[str, Any]:
    """What `data_parallel.py` is told of a run."""
    folder.mkdir(exist_ok=True)
    return {"out": str(out), "folder": str(folder), "world": world, "steps": steps, **options}


def start(out: Path, folder: Path, world: int, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs `data_parallel.py` in `world` processes, alone without torchrun."""
    return torchrun(world, str(SCRIPT), json.dumps([job(out, folder, world, **options)]))


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


AHEAD = {"ahead": [0, 1], "ahead-one": [0]}  # the processes in which all callbacks are known
SENT: dict[str, Any] = {"kernels": True, "sent": True}  # experts that are sent to a device, as to a GPU


@pytest.fixture(scope="module")
def data_parallel() -> ModuleType:
    """The module `data_parallel.py`, as the one process."""
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def alone(out: Path, data_parallel: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, with the batches of all."""
    folder = tmp_path_factory.mktemp("alone")
    data_parallel.run(job(out, folder, 1))
    return folder


@pytest.fixture(scope="module")
def of_two(out: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Runs of two processes, one after the other: a plain one, and one whose experts are sent."""
    plain, sent = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("sent")
    jobs = [job(out, plain, 2), job(out, sent, 2, accumulation=2, **SENT)]
    for name, ranks in AHEAD.items():
        jobs.append(job(out, plain.parent / name, 2, ahead=ranks))
    done = torchrun(2, str(SCRIPT), json.dumps(jobs))
    assert done.returncode == 0, done.stderr[-3000:]
    return plain, sent


def test_several_processes_train_as_one_does(alone: Path, of_two: tuple[Path, Path]) -> None:
    assert_trained_as_one(alone, of_two[0], 2)


@pytest.mark.parametrize("name", AHEAD)
def test_processes_that_read_and_log_a_step_in_the_next_one_train_as_one_does(
    alone: Path, of_two: tuple[Path, Path], name: str
) -> None:
    """Where one of them may not, for a callback, none does: they gather losses at the same places."""
    assert_trained_as_one(alone, of_two[0].parent / name, 2)
    logged = json.loads((of_two[0].parent / name / "later-0.json").read_text())
    assert any(logged) == (name == "ahead")


@pytest.mark.slow
def test_four_processes_train_as_one_does(out: Path, alone: Path, tmp_path: Path) -> None:
    done = start(out, tmp_path, 4)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_trained_as_one(alone, tmp_path, 4)


def assert_trained_as_one(alone: Path, folder: Path, world: int) -> None:
    assert losses(folder) == pytest.approx(losses(alone), abs=1e-6)
    assert not equal(tensors(folder, "before", 0), tensors(folder, "before", 1)), "each drew its own adapter"
    assert equal(tensors(folder, "before", 0), tensors(alone, "before"))
    after = tensors(folder, "after", 0)
    assert all(equal(tensors(folder, "after", rank), after) for rank in range(1, world))
    for name, expected in tensors(alone, "after").items():
        assert expected.norm() > 0, f"{name}, which may train from the second step on alone"
        # by norm: where a gradient is almost nothing, Adam makes a step of its rounding
        assert (after[name] - expected).norm() <= 1e-3 * expected.norm(), name
    for rank in range(world):
        averaged = json.loads((folder / f"averaged-{rank}.json").read_text())
        assert averaged == {"0": [(world + 1) / 2] * 3, "2": [3 / world] * 3}, (
            "a gradient of some counts as zero in the rest"
        )


def test_processes_share_experts_that_are_sent(
    out: Path, data_parallel: ModuleType, of_two: tuple[Path, Path], tmp_path: Path
) -> None:
    """Processes with unlike numbers of tokens, stacked; the last batches of a run are as of one process."""
    one, (_, two) = tmp_path / "one", of_two
    data_parallel.run(job(out, one, 1, accumulation=4, **SENT))
    assert losses(two) == pytest.approx(losses(one), rel=2e-3)
    after = tensors(two, "after", 0)
    assert equal(tensors(two, "after", 1), after)
    for rank in range(2):
        shares = json.loads((two / f"shares-{rank}.json").read_text())
        assert shares and all([first, end] == [rank * of // 2, (rank + 1) * of // 2] for first, end, of in shares)


@pytest.mark.slow
def test_a_killed_process_ends_the_run_by_name_and_the_last_checkpoint_resumes(
    out: Path, alone: Path, tmp_path: Path
) -> None:
    killed = start(out, tmp_path, 2, save=True, fate="kill", until=2)
    assert killed.returncode != 0
    assert "T534: " in killed.stderr
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
def test_a_gradient_of_one_process_that_is_not_finite_ends_all(out: Path, tmp_path: Path) -> None:
    failed = start(out, tmp_path, 2, fate="nan", until=1)
    assert failed.returncode != 0
    assert "T548: step 2: the gradient of" in failed.stderr
    assert not (tmp_path / "losses-0.json").exists()
    assert not (tmp_path / "losses-1.json").exists()


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


# Two GPUs: each process has its own, nccl reduces what is trained there and gloo what is trained on the CPU -----------
NCCL = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs for nccl")
GPU = {"kernels": True, "stack": "off"}


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attention on `cuda:0`; experts with adapters on the CPU, their weights sent to all GPUs for every call."""
    text = (resources.rules() / "moe-experts-lora.ktr").read_text()
    folder = tmp_path_factory.mktemp("on_gpu")
    rules = folder / "streamed.ktr"
    rules.write_text(text.replace("mode = train", "mode = train layerwise_prefill = 1 stream_buffer = 1MiB"))
    settings = {"device": "cuda:0", "prefill": "auto"}
    return ktc.compile("tiny:qwen3_moe", rules, folder / "two_processes", settings=settings)


@pytest.fixture(scope="module")
def alone_on_gpu(on_gpu: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, with the micro-batches of both."""
    folder = tmp_path_factory.mktemp("alone_on_gpu")
    done = start(on_gpu, folder, 1, accumulation=4, **GPU)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def near(found: list[float], expected: list[float]) -> bool:
    """The first loss is of equal weights; then a difference of a last bit is rounded to bf16."""
    return found[0] == pytest.approx(expected[0], rel=1e-5) and found == pytest.approx(expected, rel=2e-3)


@NCCL
@pytest.mark.slow
def test_two_gpus_train_as_one_does(on_gpu: Path, alone_on_gpu: Path, tmp_path: Path) -> None:
    done = start(on_gpu, tmp_path, 2, **GPU)
    assert done.returncode == 0, done.stderr[-3000:]
    assert near(losses(tmp_path), losses(alone_on_gpu)), (losses(tmp_path), losses(alone_on_gpu))
    for rank in range(2):
        devices = json.loads((tmp_path / f"devices-{rank}.json").read_text())
        assert set(devices) - {"cpu"} == {f"cuda:{rank}"}, "of trained tensors, the experts' stream and the arguments"
        assert json.loads((tmp_path / f"averaged-{rank}.json").read_text()) == {"0": [1.5] * 3, "2": [1.5] * 3}
    assert equal(tensors(tmp_path, "before", 0), tensors(alone_on_gpu, "before"))
    assert equal(tensors(tmp_path, "after", 0), tensors(tmp_path, "after", 1))


@NCCL
@pytest.mark.slow
def test_a_killed_process_on_a_gpu_ends_the_run_and_the_last_checkpoint_resumes(
    on_gpu: Path, alone_on_gpu: Path, tmp_path: Path
) -> None:
    killed = start(on_gpu, tmp_path, 2, save=True, fate="kill", until=2, **GPU)
    assert killed.returncode != 0
    assert re.search(r"rank 1 did not arrive|rank +: 1 ", killed.stderr), killed.stderr[-3000:]
    assert "T534: " in killed.stderr
    checkpoints = sorted(folder.name for folder in (tmp_path / "run").glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-1", "checkpoint-2"]
    resumed = start(on_gpu, tmp_path, 2, save=True, resume=str(tmp_path / "run" / "checkpoint-2"), **GPU)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert near(losses(tmp_path), losses(alone_on_gpu)), (losses(tmp_path), losses(alone_on_gpu))
