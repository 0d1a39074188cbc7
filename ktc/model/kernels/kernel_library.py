"""The shared library of built kernels, as the runtime opens it: once per process, after its digest was checked.

In: the path and sha256 that codegen or a manifest names. Out: kernels to make layers of, and the engine (worker threads
and workspace) they share. Refused: a file that is missing, altered or made for another Python.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import math
import os
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, cast

import torch

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import environment, host
from ktc.foundation.files import file_digest
from ktc.foundation.host import NumaNode
from ktc.model.kernels import openmp
from ktc.model.kernels.form import ExpertPart
from ktc.model.kernels.openmp import Functions

MAX_NODES: Final = 16  # `kMaxNodes`
INTERFACE: Final = 3  # `kInterface`, the arguments of the functions of a library
Strides = tuple[int, int, int]  # of expert, output and rank
# A, B and their gradients (addresses, or 0), rank (0: no LoRA), scale, whether the outputs are interleaved, where B and
# its gradient have their values.
NativeLora = tuple[int, int, int, int, int, float, bool, Strides, Strides]


class Engine(Protocol):
    """The number of threads that a call takes: PyTorch's, where it has as many, otherwise those of the library."""

    threads: int
    workspace_bytes: int


class NativeHostCall(Protocol):
    """`ktc::HostCall`; see `interface/host_call.hpp`."""

    function: int
    address: int

    def rethrow(self) -> None: ...


class NativeKernel(Protocol):
    """`ktc::MoeKernel`. Pointers are addresses; see `interface/moe.hpp` for the shapes behind them."""

    packed_bytes: int
    expert_bytes: int

    def coding(self, part: ExpertPart, /) -> tuple[str, int] | None: ...
    def saved_bytes(self, tokens: int, gate_up_rank: int, down_rank: int, /) -> int: ...
    def bind(self, packed: int, nodes: list[int], /) -> None: ...
    def shard(self, whole: int, expert: int, packed: int, /) -> None: ...
    def join(self, packed: int, expert: int, whole: int, /) -> None: ...
    def pack(
        self, packed: int, expert: int, part: ExpertPart, source: int, dtype: str, rows: int, cols: int, /
    ) -> None: ...
    def pack_codes(
        self, packed: int, expert: int, part: ExpertPart, codes: int, scales: int, rows: int, cols: int, groups: int, /
    ) -> None: ...
    def blocks(self, part: ExpertPart, /) -> str | None: ...
    def pack_blocks(
        self, packed: int, expert: int, part: ExpertPart, blocks: int, kind: str, rows: int, row_bytes: int, /
    ) -> None: ...
    def unpack(self, packed: int, expert: int, part: ExpertPart, target: int, rows: int, cols: int, /) -> None: ...
    def forward(
        self,
        engine: Engine,
        packed: int,
        x: int,
        index: int,
        weights: int,
        out: int,
        saved: int,
        tokens: int,
        lora_gate_up: NativeLora,
        lora_down: NativeLora,
        /,
    ) -> None: ...
    def call(
        self,
        engine: Engine,
        packed: int,
        x: int,
        index: int,
        weights: int,
        out: int,
        tokens: int,
        lora_gate_up: NativeLora,
        lora_down: NativeLora,
        /,
    ) -> NativeHostCall: ...
    def backward(
        self,
        engine: Engine,
        packed: int,
        index: int,
        weights: int,
        saved: int,
        x: int,
        grad_out: int,
        grad_x: int,
        grad_weights: int,
        tokens: int,
        lora_gate_up: NativeLora,
        lora_down: NativeLora,
        d_first_rows: int,
        activated_rows: int,
        /,
    ) -> None: ...


class NativeLinear(Protocol):
    """`ktc::LinearKernel`; see `interface/linear.hpp`."""

    def forward(
        self, engine: Engine, x: int, weight: int, bias: int, out: int, rows: int, inputs: int, outputs: int, /
    ) -> None: ...
    def call(
        self, engine: Engine, x: int, weight: int, bias: int, out: int, rows: int, inputs: int, outputs: int, /
    ) -> NativeHostCall: ...
    def multiply(
        self,
        engine: Engine,
        x: int,
        weight: int,
        bias: int,
        out: int,
        rows: int,
        inputs: int,
        outputs: int,
        transposed: bool,
        /,
    ) -> None: ...
    def multiply_call(
        self,
        engine: Engine,
        x: int,
        weight: int,
        bias: int,
        out: int,
        rows: int,
        inputs: int,
        outputs: int,
        transposed: bool,
        /,
    ) -> NativeHostCall: ...


class NativePackedLinear(Protocol):
    """`ktc::PackedLinearKernel`; see `interface/packed_linear.hpp`."""

    def packed_bytes(self, inputs: int, outputs: int, /) -> int: ...
    def pack(self, packed: int, blocks: int, outputs: int, row_bytes: int, /) -> None: ...
    def unpack(self, packed: int, target: int, inputs: int, outputs: int, /) -> None: ...
    def forward(
        self, engine: Engine, x: int, packed: int, bias: int, out: int, rows: int, inputs: int, outputs: int, /
    ) -> None: ...
    def call(
        self, engine: Engine, x: int, packed: int, bias: int, out: int, rows: int, inputs: int, outputs: int, /
    ) -> NativeHostCall: ...


# The address of keys or values, three strides and a width; of codes the address and three strides of their scales too.
NativeCacheView = tuple[int, int, int, int, int, int, int, int, int]

# Of a cache in pages the address of the pages of every sequence, their stride, the address of the lengths, the pages
# that the table has room for, and those of the smallest memory; zeros of others.
NativePages = tuple[int, int, int, int, int]


class NativeAttention(Protocol):
    """`ktc::AttentionKernel`; see `interface/attention.hpp`."""

    def forward(
        self,
        engine: Engine,
        element: int,
        pages: NativePages,
        query: int,
        keys: NativeCacheView,
        more_keys: NativeCacheView,
        values: NativeCacheView,
        mask: int,
        mask_batch: int,
        mask_token: int,
        sinks: int,
        out: int,
        sizes: tuple[int, int, int, int, int],
        scale: float,
        chosen: tuple[int, int, int, int],
        /,
    ) -> None: ...
    def call(
        self,
        engine: Engine,
        element: int,
        pages: NativePages,
        query: int,
        keys: NativeCacheView,
        more_keys: NativeCacheView,
        values: NativeCacheView,
        mask: int,
        mask_batch: int,
        mask_token: int,
        sinks: int,
        out: int,
        sizes: tuple[int, int, int, int, int],
        scale: float,
        chosen: tuple[int, int, int, int],
        /,
    ) -> NativeHostCall: ...


class NativeInt8Attention(NativeAttention, Protocol):
    """`ktc::Int8AttentionKernel`; see `interface/attention.hpp`."""

    def quantise(
        self, rows: int, strides: tuple[int, int, int], codes: NativeCacheView, sizes: tuple[int, int, int], /
    ) -> None: ...


class NativeSparseAttention(NativeAttention, Protocol):
    """`ktc::SparseAttentionKernel`; see `interface/attention.hpp`. An index has addresses of its parts and sizes."""

    def encode(
        self,
        engine: Engine,
        keys: NativeCacheView,
        more_keys: NativeCacheView,
        index: tuple[int, int, int, int, int, int, int],
        sizes: tuple[int, int, int, int],
        /,
    ) -> None: ...
    def select(
        self,
        engine: Engine,
        query: int,
        index: tuple[int, int, int, int, int, int, int],
        mask: int,
        mask_batch: int,
        mask_token: int,
        positions: int,
        counts: int,
        sizes: tuple[int, int, int, int, int, int],
        scale: float,
        budget: tuple[int, int, int],
        shared: bool,
        /,
    ) -> None: ...


# The address of a tensor, the number of its dtype (`ktc::step::Type`), its sizes, and its strides in elements.
NativeView = tuple[int, int, list[int], list[int]]


class NativeProgram(Protocol):
    """`ktc::step::Program`; see `step/program.hpp`."""

    def __len__(self) -> int: ...
    def run(self, begin: int, end: int, /) -> None: ...
    def call(self, call: NativeHostCall, /) -> None: ...
    def pointwise(
        self, kernel: NativeStep, function: str, out: NativeView, inputs: list[NativeView], computed: int, /
    ) -> None: ...
    def reduce(
        self, kernel: NativeStep, reduction: str, out: NativeView, input: NativeView, computed: int, /
    ) -> None: ...
    def softmax(self, kernel: NativeStep, out: NativeView, input: NativeView, computed: int, /) -> None: ...
    def matrix_product(
        self, kernel: NativeStep, engine: Engine, out: NativeView, a: NativeView, b: NativeView, bias: NativeView, /
    ) -> None: ...
    def top_k(
        self, values: NativeView, indices: NativeView, input: NativeView, largest: bool, sorted: bool, /
    ) -> None: ...
    def gather(self, out: NativeView, input: NativeView, indices: NativeView, dim: int, /) -> None: ...
    def scatter(self, target: NativeView, indices: NativeView, value: NativeView, dim: int, /) -> None: ...
    def indexed_rows(
        self, whole: NativeView, indices: NativeView, rows: NativeView, dim: int, store: bool, /
    ) -> None: ...


class NativeStep(Protocol):
    """`ktc::step::StepKernel`, which makes the operations of programs."""

    def program(self) -> NativeProgram: ...


class _Module(Protocol):
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
        make = getattr(_opened(self.library.path, self.library.digest), self.entry)
        return cast("NativeKernel", make(num_experts, hidden, intermediate, top_k, nodes))

    def linear(self) -> NativeLinear:
        """Return the kernel for linear layers of any size; the entry must be one."""
        return cast("NativeLinear", getattr(_opened(self.library.path, self.library.digest), self.entry)())

    def packed_linear(self) -> NativePackedLinear:
        """Return the kernel for linear layers of any size in blocks; the entry must be one."""
        return cast("NativePackedLinear", getattr(_opened(self.library.path, self.library.digest), self.entry)())

    def attention(self) -> NativeAttention:
        """Return the kernel for attention of any sizes; the entry must be one."""
        return cast("NativeAttention", getattr(_opened(self.library.path, self.library.digest), self.entry)())

    def int8_attention(self) -> NativeInt8Attention:
        """Return the kernel for attention of any sizes over int8 codes; the entry must be one."""
        return cast("NativeInt8Attention", getattr(_opened(self.library.path, self.library.digest), self.entry)())

    def sparse_attention(self) -> NativeSparseAttention:
        """Return the kernel for sparse attention of any sizes; the entry must be one."""
        return cast("NativeSparseAttention", getattr(_opened(self.library.path, self.library.digest), self.entry)())

    def step(self) -> NativeStep:
        """Return the kernel for decoding steps; the entry must be one."""
        return cast("NativeStep", getattr(_opened(self.library.path, self.library.digest), self.entry)())

    def engine(self, threads: int, nodes: tuple[NumaNode, ...] = (), *, own: bool = False) -> Engine:
        """Return the engine of calls with this number of threads. All layers of a process share one set of threads.

        They are the library's `own` also where PyTorch has as many, for a caller that PyTorch's threads do not serve.
        """
        return _engine(self.library.path, self.library.digest, threads, nodes, own)


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """A built library: where it is, the sha256 of its bytes, and its entries (`KernelSpec.entry`) with their dtype."""

    path: Path
    digest: str
    entries: tuple[tuple[str, str], ...]

    def kernel(self, entry: str) -> Kernel:
        """Return one entry, for `FusedMoe(kernel=...)`."""
        dtypes = dict(self.entries)
        if entry not in dtypes:
            raise KeyError(f"the kernel library `{self.path.name}` has no entry `{entry}`; it has {', '.join(dtypes)}")
        return Kernel(self, entry, dtypes[entry])


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
    share = f", its share of {host.usable_threads()} among {processes} processes" if processes > 1 else ""
    message = f"the plan needs {threads} kernel threads; this process may use {permitted}{share}"
    warnings.warn(message, stacklevel=5)


class _Turns:
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


TURNS: Final = _Turns()


@functools.cache
def _opened(path: Path, digest: str) -> _Module:
    if not path.is_file():
        raise InputRefused(
            Diagnostic("L410", f"there is no kernel library at `{path}`", hint="compile the model again")
        )
    found = file_digest(path)
    if found != digest:
        raise InputRefused(
            Diagnostic(
                "L411",
                f"the kernel library `{path}` was altered: expected sha256 `{digest[:12]}`, found `{found[:12]}`",
                hint="compile the model again; a library is code and is loaded only as it was built",
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
            Diagnostic("L412", f"the kernel library `{path}` cannot be loaded: {error}", hint="compile the model again")
        ) from error
    if getattr(module, "interface", 1) != INTERFACE:
        message = f"the kernel library `{path}` was built by another version of ktc: its functions have other arguments"
        raise InputRefused(Diagnostic("L412", message, hint="compile the model again"))
    return cast("_Module", module)


@functools.cache
def _engine(path: Path, digest: str, threads: int, nodes: tuple[NumaNode, ...], own: bool) -> Engine:
    functions = openmp.NONE if own else openmp.functions()
    return _opened(path, digest).Engine(threads, [node.cpus for node in nodes], functions)
