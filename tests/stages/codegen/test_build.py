"""Rendering, the toolchain, and the cache of built libraries: who may build what, and what is left behind.

Most tests use a stand-in for the compiler that hands out the session's library, so that they take no time.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_layers import FORMS, ISAS, SPECS, spec_of
from places import ROOT
from torch import Tensor

from ktc.diagnostics import HostLacks, InputRefused, KtcError
from ktc.foundation import host, host_file, resources
from ktc.foundation.formats import CODES, FORMATS
from ktc.foundation.host import Compiler, Host
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.references.quantised_reference import dequantise, quantise
from ktc.model.kernels.attention_spec import ISAS as ATTENTION_ISAS
from ktc.model.kernels.attention_spec import AttentionSpec
from ktc.model.kernels.fused_moe_spec import KERNELS
from ktc.model.kernels.kernel_library import KernelLibrary
from ktc.model.kernels.spec import Spec
from ktc.stages.codegen import self_test, toolchain
from ktc.stages.codegen.build import build
from ktc.stages.codegen.kinds import Kind
from ktc.stages.codegen.render import KernelSource, render

STAND_IN = """#!/bin/sh
echo call >> {calls}
for argument in "$@"; do
  [ "$argument" = -shared ] && source={library}
  [ "$previous" = -o ] && target=$argument
  previous=$argument
done
cp "${{source:-/dev/null}}" "$target"
"""


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """One line per call of the stand-in compiler."""
    path = tmp_path / "calls"
    path.touch()
    return path


@pytest.fixture
def quick_host(kernels: KernelLibrary, calls: Path, tmp_path: Path) -> Host:
    """This machine with the stand-in for a compiler."""
    script = tmp_path / "stand-in"
    script.write_text(STAND_IN.format(calls=calls, library=kernels.path))
    script.chmod(0o755)
    return replace(host.detect(), compiler=Compiler(str(script), "1"))


def left_in(cache: Path) -> list[str]:
    """The libraries in a cache, without the objects that they share."""
    return sorted(item.name for item in cache.iterdir() if item.suffix != ".lock" and item.name != "objects")


# Rendering


def test_a_rendered_kernel_says_where_it_comes_from() -> None:
    spec = spec_of("scalar", sizes=(70, None, 5, 2))
    unit = render([spec], {spec: "known (rules/moe-lora.ktr:31:3)"}).units[0]
    assert unit.name == f"{spec.entry}.cpp"
    assert unit.text.startswith(
        "// Rule: known (rules/moe-lora.ktr:31:3)\n// FusedMoeSpec: op=fused_moe, hidden=70, intermediate=None,"
    )
    assert max(map(len, unit.text.splitlines())) <= 120
    assert "using Shape = ktc::MoeShape<70, ktc::kDynamic, 5, 2>;" in unit.text


@pytest.mark.parametrize("sizes", [(None, None, None, None), (7168, 2048, 256, 8)], ids=["dynamic", "constant"])
def test_rendered_files_are_short_and_formatted(tmp_path: Path, sizes: tuple[int | None, ...]) -> None:
    in_bf16 = [name for name, row in FORMATS.items() if row.dtype == "bf16"]
    coded = [(name, size) for name in in_bf16 for size in (CODES[name].group_sizes if name in CODES else (0,))]
    specs = [
        *(spec_of(isa, form=form, sizes=sizes) for isa in KERNELS for form in FORMS),
        *(spec_of(isa, codes=codes, sizes=sizes) for isa in KERNELS for codes in coded if codes[0] in KERNELS[isa]),
    ]
    specs += [replace(spec, format_down="q6_k") for spec in specs if spec.format_down == "q4_k"]
    attention = [AttentionSpec("attention", dtype, isa) for dtype, isas in ATTENTION_ISAS.items() for isa in isas]
    sparse = [AttentionSpec("sparse_attention", spec.dtype, spec.isa) for spec in attention]
    every: list[Spec] = [*specs, *attention, *sparse]
    units = render(every, dict.fromkeys(every, "known (moe-lora.ktr:31:3)")).units
    for unit in units:
        (tmp_path / unit.name).write_text(unit.text)
        assert unit.name in ("bindings.cpp", "interface.cpp", "module.cpp") or len(unit.text.splitlines()) <= 50
    formatter = shutil.which("clang-format", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if formatter is None:
        pytest.skip("clang-format is not installed")
    style = ROOT / ".clang-format"
    files = [str(tmp_path / unit.name) for unit in units]
    check = subprocess.run([formatter, "--dry-run", f"--style=file:{style}", *files], capture_output=True, text=True)
    assert check.stderr == ""


def test_the_order_of_the_specs_and_repeats_change_nothing() -> None:
    assert render((*SPECS, SPECS[0]), {}) == render(tuple(reversed(SPECS)), {})


def test_combinations_without_a_kernel_are_refused_together() -> None:
    mixed = replace(spec_of("avx2"), format_down="fp32")
    with pytest.raises(InputRefused) as refused:
        render([spec_of("avx512", "fp32"), mixed, spec_of("scalar")], {})
    assert [fault.code for fault in refused.value.diagnostics] == ["H220", "H220"]
    assert "no kernel computes in `bf16` on `bf16/fp32` weights with `avx2`" in str(refused.value)


@pytest.mark.parametrize(
    "spec",
    [
        spec_of("amx"),
        AttentionSpec("attention", "bf16", "amx"),
        pytest.param(spec_of("amx", codes=("int8", 0)), marks=pytest.mark.slow),
        pytest.param(AttentionSpec("sparse_attention", "bf16", "amx"), marks=pytest.mark.slow),
    ],
    ids=lambda spec: spec.entry,
)
def test_a_kernel_for_amx_compiles_where_it_cannot_run(tmp_path: Path, spec: Spec) -> None:
    unit = render([spec], {}).units[0]
    source, target = tmp_path / unit.name, tmp_path / "unit.o"
    source.write_text(unit.text)
    toolchain.run(toolchain.find(host.detect()).compile_command(source, target, unit.isa))
    assert target.stat().st_size > 0


# What the host must have


def test_no_compiler_names_the_package_to_install(kernel_source: KernelSource, tmp_path: Path) -> None:
    bare = replace(host.detect(), compiler=None)
    with pytest.raises(HostLacks, match="no C\\+\\+ compiler found") as lacks:
        build(kernel_source, bare, tmp_path / "cache")
    assert "g++" in lacks.value.diagnostics[0].hint
    assert "build-essential" in lacks.value.diagnostics[0].hint
    assert not (tmp_path / "cache").exists()


def test_no_python_headers_names_the_package_to_install(
    kernel_source: KernelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(HostLacks, match=r"Python\.h") as lacks:
        build(kernel_source, host.detect(), tmp_path / "cache")
    assert "python3-dev" in lacks.value.diagnostics[0].hint


def test_an_instruction_set_the_host_lacks_is_refused_before_anything_runs(tmp_path: Path) -> None:
    old = replace(host.detect(), isas=("scalar",))
    source = render([spec_of("avx2"), spec_of("avx512_bf16"), spec_of("scalar")], {})
    with pytest.raises(HostLacks) as lacks:
        build(source, old, tmp_path / "cache")
    assert [fault.message for fault in lacks.value.diagnostics] == [
        "this machine cannot run `avx2` kernels",
        "this machine cannot run `avx512_bf16` kernels",
    ]
    assert not (tmp_path / "cache").exists()


def test_kernels_for_a_described_machine_are_refused_where_they_cannot_be_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = replace(host.detect(), isas=("avx2", "scalar"))
    monkeypatch.setattr(host, "detect", lambda: replace(described, isas=("scalar",)))
    source = render([spec_of("avx2"), spec_of("scalar")], {})
    with pytest.raises(HostLacks, match="cannot run `avx2` kernels itself, and no kernel is handed out") as lacks:
        build(source, described, tmp_path / "cache")
    assert [fault.code for fault in lacks.value.diagnostics] == ["H227"]
    assert "compile on the machine" in lacks.value.diagnostics[0].hint
    assert not (tmp_path / "cache").exists()


def test_a_described_machine_gets_the_compiler_of_this_one(
    kernel_source: KernelSource, quick_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    description = tmp_path / "other.toml"
    description.write_text(f'isa = "{ISAS[0]}"\ncores = 4\nmemory = "64GiB"\n')
    monkeypatch.setattr(host_file, "detect", lambda: quick_host)
    described = host_file.read_host_file(description)
    assert build(kernel_source, described, tmp_path / "cache").path.is_file()


# The cache


def test_a_library_is_built_once(kernel_source: KernelSource, quick_host: Host, calls: Path, tmp_path: Path) -> None:
    first = build(kernel_source, quick_host, tmp_path / "cache")
    num_calls = len(calls.read_text().splitlines())
    assert num_calls == len(kernel_source.units) + 1
    assert build(kernel_source, quick_host, tmp_path / "cache") == first
    assert len(calls.read_text().splitlines()) == num_calls


def test_a_rule_that_has_moved_builds_nothing(
    quick_host: Host, kernel_source: KernelSource, calls: Path, tmp_path: Path
) -> None:
    first = build(kernel_source, quick_host, tmp_path / "cache")
    num_calls = len(calls.read_text().splitlines())
    moved = render(SPECS, dict.fromkeys(SPECS, "another (another.ktr:1:1)"))
    assert moved != kernel_source
    assert build(moved, quick_host, tmp_path / "cache") == first
    assert len(calls.read_text().splitlines()) == num_calls


def test_another_text_or_compiler_is_another_library(
    quick_host: Host, kernel_source: KernelSource, tmp_path: Path
) -> None:
    first = build(kernel_source, quick_host, tmp_path / "cache")
    newer = replace(quick_host, compiler=Compiler(quick_host.compiler.path, "2"))  # type: ignore[union-attr]
    fewer = render(SPECS[:1], {})
    paths = {build(kernel_source, newer, tmp_path / "cache").path, build(fewer, quick_host, tmp_path / "cache").path}
    assert len(paths | {first.path}) == 3


@pytest.mark.parametrize("folder", ["runtime_include", "runtime_bindings"])
def test_another_header_is_another_library(
    kernel_source: KernelSource, quick_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    first = build(kernel_source, quick_host, tmp_path / "cache")
    headers = shutil.copytree(getattr(resources, folder)(), tmp_path / folder)
    monkeypatch.setattr(resources, folder, lambda: headers)
    assert build(kernel_source, quick_host, tmp_path / "cache") == first
    with next(headers.rglob("*.hpp")).open("a") as header:
        header.write("// one more line\n")
    assert build(kernel_source, quick_host, tmp_path / "cache").path != first.path


def test_concurrent_builders_wait_for_the_first(
    kernel_source: KernelSource, quick_host: Host, calls: Path, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(4) as pool:
        libraries = list(pool.map(lambda _: build(kernel_source, quick_host, tmp_path / "cache"), range(4)))
    assert len(set(libraries)) == 1
    assert len(calls.read_text().splitlines()) == len(kernel_source.units) + 1


def test_libraries_share_the_objects_of_equal_units(
    kernel_source: KernelSource, quick_host: Host, calls: Path, tmp_path: Path
) -> None:
    def called(source: KernelSource) -> int:
        before = len(calls.read_text().splitlines())
        build(source, quick_host, tmp_path / "cache")
        return len(calls.read_text().splitlines()) - before

    assert called(kernel_source) == len(kernel_source.units) + 1
    assert called(render(SPECS[:1], {})) == 2  # the bindings, and the link
    for item in (tmp_path / "cache" / "objects").iterdir():
        item.write_bytes(b"altered")
    fewer = render(SPECS[:2], {})
    assert called(fewer) == len(fewer.units) + 1


def test_what_a_killed_builder_left_is_replaced(kernel_source: KernelSource, quick_host: Host, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = build(kernel_source, quick_host, cache).path.parent
    (folder / "library.json").unlink()  # killed before the self-test was through
    folder.with_name(f".{folder.name}-abcd1234.writing").mkdir()  # killed while it compiled
    again = build(kernel_source, quick_host, cache)
    assert left_in(cache) == [folder.name]
    assert again.path.parent == folder


def test_an_altered_library_is_built_again(kernel_source: KernelSource, quick_host: Host, tmp_path: Path) -> None:
    library = build(kernel_source, quick_host, tmp_path / "cache")
    altered = library.path.with_name("altered")  # a new file, since this process has the old one mapped
    altered.write_bytes(library.path.read_bytes() + b"x")
    altered.rename(library.path)
    assert build(kernel_source, quick_host, tmp_path / "cache") == library


def test_a_cache_that_cannot_be_written_is_named(kernel_source: KernelSource, quick_host: Host, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HostLacks, match=r"cannot write the kernel cache `.*file/cache`") as lacks:
        build(kernel_source, quick_host, tmp_path / "file" / "cache")
    assert lacks.value.diagnostics[0].code == "H226"


def test_a_compiler_that_vanished_is_named_and_not_the_cache(tmp_path: Path) -> None:
    gone = replace(host.detect(), compiler=Compiler(str(tmp_path / "gone"), "1"))
    with pytest.raises(HostLacks, match=r"the C\+\+ compiler `.*gone` cannot be run any more") as lacks:
        build(render([spec_of("scalar")], {}), gone, tmp_path / "cache")
    assert lacks.value.diagnostics[0].code == "H221"
    assert left_in(tmp_path / "cache") == []


@pytest.mark.parametrize(
    "lines",
    [
        "kill -9 $$",
        "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1",
        "echo 'collect2: fatal error: ld terminated with signal 9 [Killed]' >&2; exit 1",
    ],
)
def test_a_compiler_that_the_system_ends_is_no_bug(lines: str, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\n{lines}\n")
    compiler.chmod(0o755)
    killed = replace(host.detect(), compiler=Compiler(str(compiler), "1"))
    with pytest.raises(HostLacks, match=r"H228: the C\+\+ compiler was ended by the system"):
        build(render([spec_of("scalar")], {}), killed, tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


def test_an_assembly_file_that_gcc_could_not_write_is_no_bug(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'fatal error: error writing to /tmp/a.s: Invalid argument' >&2; exit 1\n")
    compiler.chmod(0o755)
    failing = replace(host.detect(), compiler=Compiler(str(compiler), "1"))
    with pytest.raises(HostLacks, match=r"H226: the C\+\+ compiler could not write .*could not be written whole"):
        build(render([spec_of("scalar")], {}), failing, tmp_path / "cache")


@pytest.mark.parametrize(("number", "expected"), [(errno.ENOMEM, HostLacks), (errno.EIO, OSError)])
def test_an_error_of_the_machine_keeps_its_own_words(
    quick_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("ktc.stages.codegen.build.kind_of", lambda _: Kind(dict, fail))
    with pytest.raises(expected, match=r"too little memory|Input/output error"):
        build(render([spec_of("scalar")], {}), quick_host, tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


def test_text_that_does_not_compile_leaves_nothing(tmp_path: Path) -> None:
    source = render([spec_of("scalar")], {})
    broken = replace(source.units[0], text="#error a mistake of ours\n")
    with pytest.raises(KtcError, match="a mistake of ours") as failed:
        build(replace(source, units=(broken,)), host.detect(), tmp_path / "cache")
    assert failed.value.diagnostics[0].code == "H224"
    assert left_in(tmp_path / "cache") == []


def test_a_wrong_kernel_is_not_handed_out(
    kernel_source: KernelSource, quick_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = self_test._reference  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(self_test, "_reference", lambda *inputs: tuple(2 * each for each in reference(*inputs)))
    with pytest.raises(
        KtcError, match="is wrong: at 1 and 29 tokens its output differs from the reference by"
    ) as failed:
        build(kernel_source, quick_host, tmp_path / "cache")
    assert failed.value.diagnostics[0].code == "H225"
    assert left_in(tmp_path / "cache") == []
    assert not list((tmp_path / "cache" / "objects").glob("*.o"))


@pytest.mark.parametrize(
    ("wrong", "how"),
    [
        (lambda experts, _: experts._threads == 2, "two threads than with one"),
        (lambda _, saved: saved is None, "recomputed activations than with kept ones"),
    ],
    ids=["two threads", "recomputed"],
)
def test_a_kernel_that_is_wrong_in_one_way_of_running_is_not_handed_out(
    kernel_source: KernelSource,
    quick_host: Host,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrong: Callable[[PackedExperts, object], bool],
    how: str,
) -> None:
    backward = PackedExperts.backward

    def altered(self: PackedExperts, *inputs: Tensor, saved: Tensor | None, x_TH: Tensor | None) -> tuple[Tensor, ...]:
        grad_x, *others = backward(self, *inputs, saved=saved, x_TH=x_TH)
        return (grad_x + 1 if wrong(self, saved) else grad_x), *others

    monkeypatch.setattr(PackedExperts, "backward", altered)
    with pytest.raises(KtcError, match=f"at 1 tokens its d hidden states has other bits with {how}") as failed:
        build(kernel_source, quick_host, tmp_path / "cache")
    assert failed.value.diagnostics[0].code == "H225"


class Computed(Exception):
    """The stand-in below was asked to compute: its packed weights were accepted."""


class StandInExperts:
    """Packed experts without a kernel: what it unpacks is the reference's int4, with `flipped` changed in one value."""

    dtype, weight_dtype = torch.bfloat16, torch.float32
    flipped = 0

    def __init__(self, *_: object) -> None:
        self.parts: dict[tuple[int, str], Tensor] = {}

    def load(self, expert: int, part: str, values: Tensor) -> None:
        self.parts[expert, part] = dequantise(*quantise(values, "int4", 32), 32)

    def unpack(self, expert: int, part: str, _: tuple[int, ...]) -> Tensor:
        packed = self.parts[expert, part].clone()
        packed.view(torch.int16)[-1, -1] ^= self.flipped
        return packed

    def forward(self, *_: object, **__: object) -> None:
        raise Computed


def test_a_kernel_that_packs_one_other_bit_is_refused_before_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("scalar", codes=("int4", 32))
    kernel = KernelLibrary(Path("none.so"), "", ((spec.entry, "bf16"),)).kernel(spec.entry)
    monkeypatch.setattr(self_test, "PackedExperts", StandInExperts)
    with pytest.raises(Computed):
        self_test.self_test(kernel, spec)
    monkeypatch.setattr(StandInExperts, "flipped", 1)
    with pytest.raises(KtcError, match="packs other weights than its reference") as failed:
        self_test.self_test(kernel, spec)
    assert failed.value.diagnostics[0].code == "H225"


# The built library


def test_an_altered_library_is_not_loaded(kernels: KernelLibrary, tmp_path: Path) -> None:
    copy = tmp_path / kernels.path.name
    shutil.copy(kernels.path, copy)
    os.truncate(copy, copy.stat().st_size - 1)
    altered = replace(kernels, path=copy)
    with pytest.raises(InputRefused, match="was altered: expected sha256"):
        altered.kernel(SPECS[0].entry).engine(1)


def test_a_library_that_is_gone_or_no_library_is_named(kernels: KernelLibrary, tmp_path: Path) -> None:
    gone = replace(kernels, path=tmp_path / "gone.so")
    with pytest.raises(InputRefused, match=r"no kernel library at `.*gone\.so`"):
        gone.kernel(SPECS[0].entry).engine(1)


def test_an_entry_that_was_not_built_is_named(kernels: KernelLibrary) -> None:
    with pytest.raises(KeyError, match="has no entry `FusedMoe_other`"):
        kernels.kernel("FusedMoe_other")


@pytest.mark.parametrize("level", ["-Og", "-O3"])
def test_a_struct_by_value_arrives_in_every_call(level: str, tmp_path: Path) -> None:
    tools, program = toolchain.find(host.detect()), tmp_path / "by_value"
    source = Path(__file__).parent / "by_value.cpp"
    flags = [level if flag == "-O3" else flag for flag in tools.flags(ISAS[0], source.name)]
    subprocess.run([tools.compiler.path, *flags, str(source), "-o", str(program)], check=True)
    assert subprocess.run([program], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif("avx512_bf16" not in ISAS, reason="this machine has no AVX512-BF16")
@pytest.mark.usefixtures("optimised")
def test_the_inner_loop_keeps_its_sums_in_registers(tmp_path: Path) -> None:
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("objdump is not installed")
    unit = render([spec_of("avx512_bf16")], {}).units[0]
    source, target = tmp_path / unit.name, tmp_path / "unit.o"
    source.write_text(unit.text)
    tools = toolchain.find(host.detect())
    toolchain.run(tools.compile_command(source, target, unit.isa))
    command = (objdump, "-d", "--no-show-raw-insn", str(target))
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    products = [line for line in listing.splitlines() if "vdpbf16ps" in line]
    spilled = [line for line in products if "rsp" in line or "rbp" in line]
    # GCC 13 keeps a vector of a panel in the stack for 8 of 1,248 products, and GCC 12 none.
    allowed = 8 if tools.compiler.version.startswith("13.") else 0
    assert products and len(spilled) <= allowed, spilled


def test_a_driver_of_c_links_the_library_of_cpp(tmp_path: Path) -> None:
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("there is no gcc")
    source = tmp_path / "thrown.cpp"
    source.write_text('#include <stdexcept>\nvoid thrown() { throw std::runtime_error("it"); }\n')
    found = toolchain.find(host.detect())
    tools = replace(found, compiler=replace(found.compiler, path=gcc))
    toolchain.run(tools.compile_command(source, tmp_path / "thrown.o", "scalar"))
    toolchain.run(tools.link_command([tmp_path / "thrown.o"], tmp_path / "thrown.so"))
    ctypes.CDLL(str(tmp_path / "thrown.so"))
