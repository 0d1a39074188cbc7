"""Host facts: kernels are claimed only where they run, files are checked as a whole, paths follow the environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ktc.diagnostics import HostLacks, InputRefused
from ktc.foundation import environment, host, host_file

AVX512 = frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"})


def refused(tmp_path: Path, text: str) -> InputRefused:
    path = tmp_path / "host.toml"
    path.write_text(text)
    with pytest.raises(InputRefused) as caught:
        host_file.read_host_file(path)
    return caught.value


def test_this_machine_is_described_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from ktc.foundation import host; print(host.detect())"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_host_file_has_no_more_cores_than_any_machine(tmp_path: Path) -> None:
    (found,) = refused(tmp_path, "cores = 100000\n").diagnostics
    assert found.code == "H203" and found.span is not None
    assert found.message == "`cores` must be a count from 1 to 4096, found `100000`"


@pytest.mark.parametrize("asked", ["100000", "4, 999999999999999999999999"])
def test_an_absurd_number_of_threads_of_pytorch_is_refused(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    with pytest.raises(InputRefused, match=f"H232: `OMP_NUM_THREADS={asked}` is more than the 4096 threads"):
        environment.require_sane_threads()


@pytest.mark.parametrize("asked", ["", "4096", "16,2", "many", "-3"])
def test_a_sane_number_of_threads_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    environment.require_sane_threads()


def test_this_machine_has_sane_facts() -> None:
    here = host.detect()
    assert here.isas[-1] == "scalar"
    assert 1 <= here.cores <= here.threads
    assert here.memory > 2**28
    assert here.numa >= 1
    assert here.gpus == ()


def test_isas_stand_best_first_and_bf16_needs_all_of_its_flags() -> None:
    assert host.usable_isas(AVX512 | {"avx512_bf16", "avx512_vnni"}) == ("avx512_bf16", "avx512", "avx2", "scalar")
    assert host.usable_isas(AVX512 | {"avx512_bf16"}) == ("avx512", "avx2", "scalar")
    assert host.usable_isas(AVX512) == ("avx512", "avx2", "scalar")
    assert host.usable_isas(frozenset({"avx512_bf16", "avx2"})) == ("scalar",)


def test_amx_needs_the_kernels_consent() -> None:
    flags = AVX512 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"}
    assert host.usable_isas(flags)[0] == "amx"
    assert host.usable_isas(flags, amx_permitted=False)[0] == "avx512_bf16"


def test_restricting_keeps_only_weaker_sets_and_refuses_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "host.toml"
    path.write_text('isa = "avx2"')
    described = host_file.read_host_file(path)
    assert host.restrict(described, "scalar").isas == ("scalar",)
    with pytest.raises(HostLacks, match=r"it lacks .*`avx512_bf16`"):
        host.restrict(described, "avx512_bf16")
    with pytest.raises(InputRefused, match="unknown instruction set `mmx`"):
        host.restrict(described, "mmx")


def test_host_file_describes_another_machine(tmp_path: Path) -> None:
    path = tmp_path / "big.toml"
    path.write_text(
        'isa = "amx"\ncores = 96\nnuma = 2\nmemory = "512GiB"\n[[gpu]]\nmemory = "24GiB"\n[[gpu]]\nmemory = 1000\n'
    )
    described = host_file.read_host_file(path)
    assert described.isas == ("amx", "avx512_bf16", "avx512", "avx2", "scalar")
    assert (described.cores, described.threads, described.numa) == (96, 96, 2)
    assert described.memory == 512 * 2**30
    assert [gpu.memory for gpu in described.gpus] == [24 * 2**30, 1000]


def test_host_file_may_leave_things_to_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "host.toml"
    path.write_text("cores = 1\n")
    described, here = host_file.read_host_file(path), host.detect()
    assert (described.isas, described.memory) == (here.isas, here.memory)


def test_all_faults_of_a_host_file_come_together_with_their_places(tmp_path: Path) -> None:
    error = refused(tmp_path, 'cores = 0\nisa = "sse9"\nmemory = "much"\nwhat = 1\n[[gpu]]\nname = "x"\n')
    places = {(d.code, d.span.line if d.span else 0) for d in error.diagnostics}
    assert places == {("H203", 1), ("H203", 2), ("H203", 3), ("H202", 4), ("H203", 5)}


def test_broken_toml_is_located(tmp_path: Path) -> None:
    (diagnostic,) = refused(tmp_path, "cores = 1\nisa = = 3\n").diagnostics
    assert diagnostic.code == "H201"
    assert diagnostic.span is not None
    assert diagnostic.span.line == 2


def test_missing_host_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="H200"):
        host_file.read_host_file(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512GiB", 512 * 2**30),
        ("1.5 TB", 1_500_000_000_000),
        (7, 7),
        ("7B", 7),
        ("7 parsecs", None),
        (True, None),
        ("0", None),
    ],
)
def test_sizes(text: object, size: int | None) -> None:
    assert host_file.parse_bytes(text) == size


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KTC_CACHE_DIR", str(tmp_path / "own"))
    assert environment.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("KTC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment.cache_dir() == tmp_path / "ktc"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert environment.cache_dir() == Path.home() / ".cache" / "ktc"


def test_local_world_size_is_one_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert environment.local_world_size() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert environment.local_world_size() == 4


def test_local_rank_is_zero_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert environment.local_rank() == 0
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert environment.local_rank() == 3


def test_compiler_is_found_or_absent_without_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host.find_compiler() is None


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/job", {"job/cpu.max": "300000 100000", "cpu.max": "max 100000"}, 3),
        ("0::/job", {"job/cpu.max": "max 100000", "cpu.max": "150000 100000"}, 2),
        ("3:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "500000", "cpu/job/cpu.cfs_period_us": "100000"}, 5),
        ("3:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, 8),
        ("0::/job", {}, 8),
    ],
    ids=["version 2", "of a group above", "version 1", "version 1 without a quota", "no quota"],
)  # fmt: skip
def test_threads_are_no_more_than_a_containers_quota(
    monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, str], expected: int
) -> None:
    held = {"/proc/self/cgroup": groups, **{f"/sys/fs/cgroup/{name}": text for name, text in files.items()}}
    monkeypatch.setattr(host, "_read", lambda path: held.get(str(path), ""))
    monkeypatch.setattr(host, "_own_cpus", lambda: set(range(8)))
    assert host.usable_threads() == expected


def test_numa_nodes_are_those_with_cpus_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, cpus in ((0, "0-3,8"), (2, "4-7"), (10, "9-11"), (1, "")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{cpus}\n")
    monkeypatch.setattr(host, "_NODES", tmp_path)
    monkeypatch.setattr(host, "_own_cpus", lambda: {1, 2, 8, 9})
    assert host.numa_nodes() == (host.NumaNode(0, (1, 2, 8)), host.NumaNode(10, (9,)))
    monkeypatch.setattr(host, "_NODES", tmp_path / "none")
    assert host.numa_nodes() == ()


@pytest.mark.parametrize(
    ("free", "taken"), [(80, 0), (79.2, 0), (78.9, 5), (30, 50), (29, 52), (26, 54), (9.5, 71), (0, 80)]
)  # fmt: skip
def test_what_others_take_of_a_gpu_is_rounded_up_by_an_eighth_of_what_is_left(free: float, taken: int) -> None:
    assert host.taken_of(80 << 30, int(free * 2**30)) == taken << 30
