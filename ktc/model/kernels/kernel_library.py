"""The shared library of built kernels, as the runtime opens it: once per process, after its digest was checked.

In: the path and sha256 that codegen or a manifest names. Out: kernels to make layers of, and the engine (worker threads
and workspace) they share. Refused: a file that is missing, altered or made for another Python.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import math
import os
import re
import threading
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol, cast

import torch

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import environment, host, resources
from ktc.foundation.files import file_digest
from ktc.foundation.host import NumaNode
from ktc.model.kernels import openmp
from ktc.model.kernels.form import ExpertPart
from ktc.model.kernels.openmp import Functions

_UNREAD: Final = re.compile(r"//[^\n]*|\s+")  # by a compiler
MAX_NODES: Final = 16  # `kMaxNodes`
# A struct of `runtime/include/ktc/interface` by the names of its fields. Pointers are addresses, 0 for null; a struct
# within it is a dictionary too. Kernels raise `TypeError` for another name, and for a missing field without a default.
Arguments = dict[str, Any]


class Engine(Protocol):
    """The number of threads that a call takes: PyTorch's, where it has as many, otherwise those of the library."""

    threads: int
    workspace_bytes: int


class NativeHostCall(Protocol):
    """`ktc::HostCall`; see `interface/host_call.hpp`."""

    function: int
    address: int
    work: tuple[int, int, int, float, float]

    def rethrow(self, runs: int = ..., /) -> None: ...


class NativeHostThread(Protocol):
    """`ktc::HostThread`; see `interface/host_thread.hpp`. The address is that of a `Mailbox` in `memory`."""

    mailbox_bytes: int
    done_at: int
    expected: int

    def __call__(self, address: int, memory: object, /) -> NativeHostThread: ...
    def expect(self, calls: int, /) -> None: ...
    def dismiss(self) -> None: ...
    def wait(self, seconds: float, left: int, /) -> bool: ...


class NativeForward(Protocol):
    """A kernel that computes one product, at once or later."""

    def forward(self, engine: Engine, arguments: Arguments, /) -> None: ...
    def call(self, engine: Engine, arguments: Arguments, /) -> NativeHostCall: ...


class NativeKernel(NativeForward, Protocol):
    """`ktc::MoeKernel` of `interface/moe.hpp`; `matrix` has the fields of `ExpertMatrix`."""

    packed_bytes: int
    expert_bytes: int

    def coding(self, part: ExpertPart, /) -> tuple[str, int] | None: ...
    def blocks(self, part: ExpertPart, /) -> str | None: ...
    def saved_bytes(self, tokens: int, gate_up_rank: int, down_rank: int, /) -> int: ...
    def bind(self, packed: int, nodes: list[int], /) -> None: ...
    def shard(self, whole: int, expert: int, packed: int, /) -> None: ...
    def join(self, packed: int, expert: int, whole: int, /) -> None: ...
    def pack(self, matrix: Arguments, source: int, dtype: str, /) -> None: ...
    def pack_codes(self, matrix: Arguments, codes: int, scales: int, groups: int, /) -> None: ...
    def pack_blocks(self, matrix: Arguments, blocks: int, kind: str, /) -> None: ...
    def unpack(self, matrix: Arguments, target: int, /) -> None: ...
    def backward(self, engine: Engine, arguments: Arguments, /) -> None: ...
    def partial_call(self, engine: Engine, arguments: Arguments, choices: int, units: int, /) -> NativeHostCall: ...


class NativeLinear(NativeForward, Protocol):
    """`ktc::LinearKernel` of `interface/linear.hpp`."""

    def multiply(self, engine: Engine, arguments: Arguments, /) -> None: ...
    def multiply_call(self, engine: Engine, arguments: Arguments, /) -> NativeHostCall: ...


class NativePackedLinear(NativeForward, Protocol):
    """`ktc::PackedLinearKernel` of `interface/packed_linear.hpp`."""

    def packed_bytes(self, inputs: int, outputs: int, /) -> int: ...
    def pack(self, packed: int, blocks: int, outputs: int, row_bytes: int, /) -> None: ...
    def unpack(self, packed: int, target: int, inputs: int, outputs: int, /) -> None: ...


class NativeInt8Attention(NativeForward, Protocol):
    """`ktc::Int8AttentionKernel` of `interface/attention.hpp`."""

    def quantise(self, arguments: Arguments, /) -> None: ...


class NativeSparseAttention(NativeForward, Protocol):
    """`ktc::SparseAttentionKernel` of `interface/attention.hpp`."""

    def encode(self, engine: Engine, arguments: Arguments, /) -> None: ...
    def select(self, engine: Engine, arguments: Arguments, /) -> None: ...


class NativeProgram(Protocol):
    """`ktc::step::Program`; tensors have `data`, `type` (`ktc::step::Type`), `sizes`, and `strides` in elements."""

    def __len__(self) -> int: ...
    def run(self, begin: int, end: int, /) -> None: ...
    def call(self, call: NativeHostCall, /) -> None: ...
    def pointwise(
        self, kernel: NativeStep, function: str, out: Arguments, inputs: list[Arguments], computed: int, /
    ) -> None: ...
    def reduce(
        self, kernel: NativeStep, reduction: str, out: Arguments, input: Arguments, computed: int, /
    ) -> None: ...
    def softmax(self, kernel: NativeStep, out: Arguments, input: Arguments, computed: int, /) -> None: ...
    def matrix_product(
        self, kernel: NativeStep, engine: Engine, out: Arguments, a: Arguments, b: Arguments, bias: Arguments, /
    ) -> None: ...
    def top_k(
        self, values: Arguments, indices: Arguments, input: Arguments, largest: bool, sorted: bool, /
    ) -> None: ...
    def gather(self, out: Arguments, input: Arguments, indices: Arguments, dim: int, /) -> None: ...
    def scatter(self, target: Arguments, indices: Arguments, value: Arguments, dim: int, /) -> None: ...
    def indexed_rows(self, whole: Arguments, indices: Arguments, rows: Arguments, dim: int, store: bool, /) -> None: ...


class NativeStep(Protocol):
    """`ktc::step::StepKernel`, which makes the operations of programs."""

    def program(self) -> NativeProgram: ...


class _Module(Protocol):
    HostThread: NativeHostThread

    def Engine(self, threads: int, nodes: list[tuple[int, ...]], openmp: Functions, /) -> Engine: ...


@dataclass(frozen=True, slots=True)
class Kernel:
    """One entry of a kernel library. `dtype` is what it computes in: bf16, fp32 or fp64; of a linear one fp16 too."""

    library: KernelLibrary
    entry: str
    dtype: str

    def instantiate(self, num_experts: int, hidden: int, intermediate: int, top_k: int, nodes: int = 1) -> NativeKernel:
        """Return the kernel for one layer, with weights cut for this number of NUMA nodes.

        Raises `ValueError` for a size other than the one it was built for.
        """
        return cast("NativeKernel", self.native(num_experts, hidden, intermediate, top_k, nodes))

    def native(self, *sizes: int) -> Any:
        """Return the kernel as the protocol of its kind; only one for experts takes sizes."""
        return getattr(self.library.extension(), self.entry)(*sizes)

    def opened(self, threads: int) -> tuple[Any, Engine]:
        """Return the kernel, and the engine of its calls with at most this number of threads; each is made once."""
        key = self.library.digest, self.entry, threads
        if key not in _OPENED:
            _OPENED[key] = self.native(), self.engine(permitted_threads(threads))
        return _OPENED[key]

    def engine(self, threads: int, nodes: tuple[NumaNode, ...] = (), *, separate: bool = False) -> Engine:
        """Return the engine of calls with this number of threads. All layers of a process share one set of threads.

        With `separate` they are the library's also where PyTorch has as many, for a caller on another thread.
        """
        self.library.extension()
        return _engine(self.library.path, self.library.digest, threads, nodes, separate)

    @property
    def host_thread(self) -> NativeHostThread:
        """The class of threads that make calls of this library's kernels."""
        return self.library.extension().HostThread


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """A built library: where it is, the sha256 of its bytes, and its entries (`Spec.entry`) with their dtype.

    `builds` has, by entry, the digest of what the code of the entry was built from. A library that was opened from a
    compiled model has none: the manifest keeps them. `renewal` is the command that compiles its model again, if known.
    """

    path: Path
    digest: str
    entries: tuple[tuple[str, str], ...]
    builds: tuple[tuple[str, str], ...] = ()
    renewal: str = field(default="", compare=False)

    def extension(self) -> Any:
        """Return the extension. Raises InputRefused (L410 to L412), with the command that compiles the model again."""
        try:
            return _opened(self.path, self.digest)
        except InputRefused as refused:
            again = f"{_AGAIN}: `{self.renewal}`" if self.renewal else _AGAIN
            named = (replace(one, hint=one.hint.replace(_AGAIN, again)) for one in refused.diagnostics)
            raise InputRefused(*named) from refused

    def kernel(self, entry: str) -> Kernel:
        """Return one entry, for `PackedExperts`."""
        dtypes = dict(self.entries)
        if entry not in dtypes:
            raise KeyError(f"the kernel library `{self.path.name}` has no entry `{entry}`; it has {', '.join(dtypes)}")
        return Kernel(self, entry, dtypes[entry])


_AGAIN: Final = "compile the model again"
_OPENED: Final[dict[tuple[str, str, int], tuple[Any, Engine]]] = {}  # by digest: the hash of a `Kernel` takes 1 us


def permitted_threads(threads: int) -> int:
    """Return `threads`, or the number that this process may use now if that is smaller.

    It is this process's share of its CPUs, or of its container's quota. The machine may differ from that of the plan,
    so layers call this when they are made. The first smaller number causes a warning.
    """
    permitted = max(1, host.usable_threads() // environment.local_world_size())
    if threads > permitted:
        _warn_of_fewer(threads, permitted)
    return min(threads, permitted)


def nodes_for(threads: int) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes to cut weights for: those that this process may run on, or none.

    Each must get at least one thread and have a CPU for each of its threads. Nodes share the threads evenly, so on a
    node of fewer CPUs several threads would wait for one.
    """
    nodes = host.numa_nodes()
    if not 1 < len(nodes) <= min(threads, MAX_NODES):
        return ()
    of_node = math.ceil(threads / len(nodes))
    return nodes if all(len(node.cpus) >= of_node for node in nodes) else ()


def on_torch_threads(threads: int) -> bool:
    """Return whether calls of this many threads run on PyTorch's: it has as many, and memory has one node."""
    return all(openmp.functions()) and threads <= torch.get_num_threads() and not nodes_for(threads)


@functools.cache
def _warn_of_fewer(threads: int, permitted: int) -> None:
    processes = environment.local_world_size()
    if environment.started_for() is not None:  # by `ktc train`, which divides the threads
        return
    share = f", its share of {host.usable_threads()} among {processes} processes" if processes > 1 else ""
    message = f"the plan needs {threads} kernel threads; this process may use {permitted}{share}"
    warnings.warn(message, stacklevel=5)


class _KernelLock:
    """A lock for calls of kernels: one at a time in this process, whichever compiled model they belong to.

    Two models may each have a library with threads of its own, which together would use twice the cores. A forked child
    begins with a free lock: the thread that held it in the parent does not exist there.
    """

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


KERNEL_LOCK: Final = _KernelLock()


@functools.cache
def interface_digest() -> str:
    """Return a digest of the functions that this version of ktc calls, and of their argument structs.

    It is of the text of the interface and of the bindings, without comments and white space. A library has that of the
    text that it was compiled from.
    """
    bindings = resources.runtime_bindings()
    folders = (resources.runtime_include() / "ktc" / "interface", bindings / "ktc_python")
    headers = (path for folder in folders for path in folder.glob("*.hpp"))
    text = "".join(path.read_text(encoding="utf-8") for path in sorted((*headers, *bindings.glob("*.cpp"))))
    return hashlib.sha256(_UNREAD.sub("", text).encode()).hexdigest()[:16]


@functools.cache
def _opened(path: Path, digest: str) -> _Module:
    if not path.is_file():
        raise InputRefused(Diagnostic("L410", f"there is no kernel library at `{path}`", hint=_AGAIN))
    present = file_digest(path)
    if present != digest:
        raise InputRefused(
            Diagnostic(
                "L411",
                f"the kernel library `{path}` was altered: expected sha256 `{digest[:12]}`, found `{present[:12]}`",
                hint=f"{_AGAIN}; a library is code and is loaded only as it was built",
            )
        )
    # Several compiled models may live in one process. pybind11 remembers an extension by its full name, and would give
    # the first library's module for the second: the digest makes the names differ, and Python reads only the last part.
    name = f"ktc_{digest[:16]}.ktc_kernels"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None, "a spec made with a loader exists"
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise InputRefused(
            Diagnostic("L412", f"the kernel library `{path}` cannot be loaded: {error}", hint=_AGAIN)
        ) from error
    if getattr(module, "interface", None) != interface_digest():
        message = f"the kernel library `{path}` was built by another version of ktc: its functions have other arguments"
        raise InputRefused(Diagnostic("L412", message, hint=_AGAIN))
    return cast("_Module", module)


@functools.cache
def _engine(path: Path, digest: str, threads: int, nodes: tuple[NumaNode, ...], separate: bool) -> Engine:
    functions = openmp.NONE if separate else openmp.functions()
    return _opened(path, digest).Engine(threads, [node.cpus for node in nodes], functions)
