"""Options and fixtures of the whole test suite."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

# Without a GPU, kernels for it run in Triton's interpreter, on the CPU. Triton reads this once, when it is imported.
os.environ.setdefault("TRITON_INTERPRET", str(int(not [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("dxg")])))

import cached_compiler
import pytest
import quick_interpreter
import software_tiles
from filelock import FileLock
from places import GOLDEN, OBJECTS, TESTS
from shared_captures import CAPTURING, SharedCaptures, shares
from shared_proofs import PROVING, SharedProofs

# Before the conftest of a folder reads the instruction sets of this machine. Workers of xdist inherit the variable.
if "--software-tiles" in sys.argv:
    os.environ["KTC_TESTS_WITH_TILES"] = "1"
if "KTC_TESTS_WITH_TILES" in os.environ:
    software_tiles.use()

if TYPE_CHECKING:
    from ktc.model.kernels.kernel_library import KernelLibrary
    from ktc.stages.codegen.render import KernelSource


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bless", action="store_true", help="rewrite the golden files with what the code gives now")
    parser.addoption("--software-tiles", action="store_true", help="test the kernels for AMX without AMX, slowly")
    parser.addoption("--optimised", action="store_true", help="build kernels with the flags of the product, not at -Og")


def pytest_configure() -> None:
    """Garbage in circles is searched for a hundredth as often: graphs make many objects, and nearly all of them stay.

    A test that counts on it calls `gc.collect` itself.
    """
    gc.set_threshold(7000, 10, 100)


def pytest_collection_finish() -> None:
    """Torch and transformers, which live as long as the process, are not searched for garbage again and again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Kernels that Triton interprets do not patch its language once more at each call (`quick_interpreter.py`)."""
    quick_interpreter.use()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the last test of a file, objects that outlive it (shared captures, kernels) are not searched again either.

    Accelerate, at the begin of each training, searches the whole heap: a second where thousands of tests ran before.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_settings_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests read no measured rates of the machine that they run on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares `text` with `tests/golden/<name>`; under `--bless` it rewrites that file."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--bless"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no golden file `{name}`: run `pytest --bless` and read the difference"
        assert text == path.read_text(encoding="utf-8")

    return check


@pytest.fixture(scope="session")
def hand_made() -> ModuleType:
    """The module `hand_made.py`: `package(checkpoint)` and `recipe(model)`."""
    path = TESTS / "support" / "hand_made.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small DeepSeek-V2 checkpoint folder."""
    from ktc.model import twin

    return twin.write("deepseek_v2", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def compiled(checkpoint: Path, hand_made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That checkpoint as a compiled model without kernels: LoRA on attention, routed experts in one module."""
    from ktc.stages.link import link

    return link(hand_made.package(checkpoint), tmp_path_factory.mktemp("build") / "v2_twin")


@pytest.fixture(scope="session")
def compiled_twin(run_folder: Path) -> Callable[..., Path]:
    """`compiled_twin(model, rules, device)` compiles once per run and returns OUT, a package with its own name."""
    import ktc

    folder = run_folder / "compiled"
    folder.mkdir(exist_ok=True)

    def compile_once(model: str, rules: str, device: str = "cpu") -> Path:
        out = folder / f"e2e_{model.rpartition(':')[2]}_{rules}_{device}".replace("-", "_")
        with FileLock(out.with_suffix(".lock")):
            return out if out.is_dir() else ktc.compile(model, rules, out, settings={"device": device})

    return compile_once


@pytest.fixture(scope="session")
def inference_twin(run_folder: Path) -> Callable[..., Path]:
    """`inference_twin(family, **settings)` compiles a twin for inference on the CPU, once per run, and returns OUT."""
    import ktc

    def compile_once(family: str, **settings: str) -> Path:
        out = run_folder / "_".join(["native", family, *(f"{name}_{value}" for name, value in settings.items())])
        with FileLock(out.with_suffix(".lock")):
            return out if out.is_dir() else ktc.compile(f"tiny:{family}", "moe-inference", out, settings=settings)

    return compile_once


@pytest.fixture(scope="session")
def adapter(compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of `compiled` with a strong effect."""
    from strong_adapters import save_strong_adapter

    from ktc.model.loading.peft_glue import read_lora_config

    return save_strong_adapter(compiled, read_lora_config(compiled), tmp_path_factory.mktemp("adapter") / "tuned", 1)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A temporary folder that the worker processes of this run share."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if os.environ.get("PYTEST_XDIST_WORKER") else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def _same_compiler() -> Iterator[None]:
    """PEFT's BOFT sets the names of the compilers and does not set them back: later tests would not use the cache."""
    before = {name: os.environ.get(name) for name in ("CC", "CXX")}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="session", autouse=True)
def _own_cache(run_folder: Path) -> Iterator[None]:
    """Twins and kernels are cached for this run only: tests neither use nor touch the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KTC_CACHE_DIR", str(run_folder / "cache"))
        yield


@pytest.fixture(scope="session")
def shared_captures() -> SharedCaptures:
    """The captures of this process, by config."""
    from ktc.stages.capture import capture

    return SharedCaptures(capture)


@pytest.fixture(scope="session")
def shared_proofs(run_folder: Path) -> SharedProofs:
    """The proofs of this run, by config and rewrites."""
    from ktc.stages import proof

    (run_folder / "proofs").mkdir(exist_ok=True)
    return SharedProofs(proof.prove, run_folder / "proofs")


@pytest.fixture(scope="module", autouse=True)
def _shared_captures(request: pytest.FixtureRequest) -> Iterator[None]:
    """In the rooms that share captures a config is captured once, and equal rewrites of it are proven once.

    `tests/support/shared_captures.py` and `shared_proofs.py`.
    """
    if not shares(request.path.relative_to(TESTS).as_posix()):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for stage in CAPTURING:
            patch.setattr(f"{stage}.capture", request.getfixturevalue("shared_captures"))
        patch.setattr(PROVING, request.getfixturevalue("shared_proofs"))
        yield


@pytest.fixture
def own_captures(shared_captures: SharedCaptures, shared_proofs: SharedProofs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture and the proof are a part of the subject: they are not shared."""
    for stage in CAPTURING:
        monkeypatch.setattr(f"{stage}.capture", shared_captures.capture)
    monkeypatch.setattr(PROVING, shared_proofs.prove)


@pytest.fixture(scope="session")
def compilers(run_folder: Path) -> dict[str, str]:
    """The stand-ins for the C++ compiler, `quick` at -Og and `optimised` as the product builds; none without one."""
    from ktc.foundation.host import find_compiler

    real = find_compiler()
    if real is None:
        return {}
    cached_compiler.remove_unused(OBJECTS)
    return {
        kind: str(cached_compiler.installed(run_folder / kind, real.path, real.version, OBJECTS, flag))
        for kind, flag in (("quick", cached_compiler.QUICK), ("optimised", "-O3"))
    }


@pytest.fixture(scope="session", autouse=True)
def _cached_compiler(compilers: dict[str, str], request: pytest.FixtureRequest) -> Iterator[None]:
    """Objects are kept between runs (`tests/support/cached_compiler.py`)."""
    with pytest.MonkeyPatch.context() as patch:
        if compilers:
            patch.setenv("CXX", compilers["optimised" if request.config.getoption("--optimised") else "quick"])
        yield


@pytest.fixture
def optimised(compilers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler makes of a kernel is the subject: the flags of the product."""
    if compilers:
        monkeypatch.setenv("CXX", compilers["optimised"])


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small models on one thread: on a busy machine a team of threads waits for its slowest at every operation."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _repaired_transformers() -> None:
    """Releases before 5.15 forgot an attribute without which the group-limited routing of DeepSeek-V2 cannot run."""
    from ktc.foundation import versions

    if versions.release(versions.installed("transformers") or "0") >= (5, 15):
        return
    from transformers.models.deepseek_v2 import modeling_deepseek_v2

    block = modeling_deepseek_v2.DeepseekV2Moe
    block.num_experts = property(lambda self: self.config.n_routed_experts)  # its experts may be replaced


@pytest.fixture(scope="session")
def kernel_source() -> KernelSource:
    """The source of the kernels that most tests share."""
    from kernel_layers import SPECS

    from ktc.stages.codegen.render import render

    return render(SPECS, dict.fromkeys(SPECS, "tests/conftest.py:1:1"))


@pytest.fixture(scope="session")
def kernels(kernel_source: KernelSource) -> KernelLibrary:
    """Their library, built once per run."""
    from merged_units import merged

    from ktc.foundation import host
    from ktc.stages.codegen.build import build

    return build(merged(kernel_source), host.detect())


@pytest.fixture
def bench(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`bench(*options)` runs `ktc bench moe` and returns its exit code, stdout and stderr."""
    from ktc.cli import app as cli

    def call(*options: str) -> tuple[int, str, str]:
        code = cli.main(["bench", "moe", *options])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture
def kt_python(tmp_path: Path) -> Callable[[str], str]:
    """`kt_python(words)`: a program that is run as kt-kernel's Python would be, and does as `words` say."""
    stub = TESTS / "support" / "kt_stub.py"

    def make(words: str) -> str:
        program = tmp_path / "python"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "{stub}" "{words}"\n', encoding="utf-8")
        program.chmod(0o755)
        return str(program)

    return make
