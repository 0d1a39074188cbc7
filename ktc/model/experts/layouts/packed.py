"""The experts of one layer in a kernel's packed form, and the kernel called on tensors.

In: matrices of any float dtype, codes with their scales, or blocks of a GGUF file, one at a time. Out: `forward` and
`backward` on contiguous CPU tensors of the kernel's dtype. The storage is one anonymous mapping on huge pages, outside
PyTorch, so that nothing copies or moves it. `PackedExperts.key` names a kernel for a layer's sizes as an operator can
take it: as a string.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NoReturn

import torch
from torch import Tensor

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.anonymous_memory import HUGE_PAGE, anonymous
from ktc.foundation.formats import FORMATS, STORED, Dense, WeightFormat
from ktc.foundation.host import NumaNode
from ktc.model.experts.layouts.panels import Panels, panels_of
from ktc.model.experts.layouts.saved_buffers import SavedBuffers
from ktc.model.experts.trained.lora import NO_LORA, ExpertsLora, lora_arguments
from ktc.model.kernels import kernel_clock
from ktc.model.kernels.form import ExpertPart, ExpertsSizes
from ktc.model.kernels.kernel_calls import HostCall, bind_later
from ktc.model.kernels.kernel_library import (
    KERNEL_LOCK,
    Arguments,
    Engine,
    Kernel,
    KernelLibrary,
    NativeHostThread,
    nodes_for,
    permitted_threads,
)
from ktc.model.kernels.step_context import StepContext

DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_PANEL: Final = 32  # `kPanelWidth`
Numa = Literal["none", "shard"]  # whether weights are cut for the nodes of the machine that loads them
_LEAST_BESIDE: Final = 8  # threads of which one is left out beside a GPU
_SAVED: Final = SavedBuffers()  # one for all layers: backward frees what the next forward takes


@dataclass(frozen=True, slots=True)
class SlotRows:
    """The rows whose products are the gradients of weights, by slot: sorted by expert, then by (token, k).

    `d_first` (S, parts, Ip) are the gradients of gate and up, with the routing weight, `activated` (S, Ip) what the
    activation returned, in the kernel's dtype. Ip is I rounded up to 32, and values past I are not defined.
    """

    d_first: Tensor
    activated: Tensor

    @classmethod
    def empty(cls, slots: int, parts: int, intermediate: int, dtype: torch.dtype) -> SlotRows:
        """Return rows for backward to fill."""
        padded = -(-intermediate // _PANEL) * _PANEL
        return cls(torch.empty(slots, parts, padded, dtype=dtype), torch.empty(slots, padded, dtype=dtype))


def _beside_gpu(threads: int) -> int:
    """Return the threads of calls in a step of a GPU: a core is left to its driver and to Python."""
    return threads - 1 if threads >= _LEAST_BESIDE else threads


class PackedExperts:
    """Packed weights and the kernel that reads them. Frozen once loaded: copies of a model share them.

    `sizes` are experts, hidden, intermediate, and experts per token. `dtype` is that of hidden states and packed
    weights, `weight_dtype` that of routing weights. The bytes `packed` are at `address`.
    """

    def __init__(self, kernel: Kernel, threads: int, sizes: ExpertsSizes, numa: Numa = "shard") -> None:
        threads = permitted_threads(threads)
        self._bind(kernel, threads, sizes, nodes_for(threads) if numa == "shard" else ())
        self._use_new_memory()

    @staticmethod
    @functools.cache
    def named(key: str) -> PackedExperts:
        """Return the kernel that a `key` names, without weights: `with_bytes` adds them."""
        path, digest, entry, dtype, threads, sizes, nodes = json.loads(key)
        made = PackedExperts.__new__(PackedExperts)
        kernel = Kernel(KernelLibrary(Path(path), digest, ()), entry, dtype)
        of_nodes = tuple(NumaNode(number, tuple(cpus)) for number, cpus in nodes)
        made._bind(kernel, threads, ExpertsSizes(*sizes), of_nodes)
        return made

    def _bind(self, kernel: Kernel, threads: int, sizes: ExpertsSizes, nodes: tuple[NumaNode, ...]) -> None:
        self._native = kernel.instantiate(*sizes, max(1, len(nodes)))
        self._kernel, self._threads, self.sizes, self._nodes = kernel, threads, sizes, nodes
        self.dtype = DTYPES[kernel.dtype]
        self.weight_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        library = kernel.library
        of_nodes = [(node.number, node.cpus) for node in nodes]
        self.key = json.dumps((str(library.path), library.digest, kernel.entry, kernel.dtype, threads, sizes, of_nodes))

    def _use(self, packed: Tensor, *, mapped: bool = False) -> None:
        """Compute from these bytes. Those that are `mapped` belong to others, and are only read."""
        self.packed, self.is_mapped = packed, mapped
        self.address = packed.data_ptr()

    def _use_new_memory(self) -> None:
        self._use(huge_pages(self._native.packed_bytes))
        if self._nodes:
            self._native.bind(self.address, [node.number for node in self._nodes])

    def _copied(self) -> PackedExperts:
        other = self.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def with_bytes(self, packed: Tensor) -> PackedExperts:
        """Return the same kernel on other packed bytes, which are only read."""
        other = self._copied()
        other._use(packed, mapped=True)
        return other

    def beside(self) -> PackedExperts:
        """Return the same kernel and threads with memory of its own, in which nothing is loaded."""
        other = self._copied()
        other._use_new_memory()
        return other

    def unloaded(self) -> PackedExperts:
        """Return the same kernel with memory of its own on one node, in which nothing is loaded."""
        other = self._copied()
        other._bind(self._kernel, 1, self.sizes, ())
        other._use_new_memory()
        return other

    def with_threads(self, threads: int) -> PackedExperts:
        """Return the same weights with exactly this many threads."""
        other = self._copied()
        other._bind(self._kernel, threads, self.sizes, self._nodes)
        return other

    def saved_bytes(self, gate_up_rank: int, down_rank: int) -> int:
        """Count the bytes that forward saves for backward of each token, with LoRA of these ranks (0: none)."""
        return self._native.saved_bytes(1, gate_up_rank, down_rank)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights, expert after expert; cut for several nodes they take up to 2 MB each more."""
        return self._native.expert_bytes * self.sizes.num_experts

    @property
    def num_nodes(self) -> int:
        """The number of NUMA nodes, for each of which the weights have a shard."""
        return max(1, len(self._nodes))

    def coding(self, part: ExpertPart) -> tuple[str, int] | None:
        """Return the format of a part's codes and the size of their groups, `None` if it is stored as values."""
        return self._native.coding(part)

    def stored(self, part: ExpertPart) -> tuple[WeightFormat, int]:
        """Return the format that gate and up, or down, are stored in, and the size of its groups."""
        blocks = self.blocks(part)
        return self.coding(part) or (STORED[blocks].name if blocks else self._kernel.dtype, 0)

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether all weights are stored in the dtype that is multiplied."""
        return all(isinstance(FORMATS[self.stored(part)[0]], Dense) for part in ("up", "down"))

    @functools.cached_property
    def panels(self) -> tuple[Panels, Panels]:
        """The panels of gate and up, and of down."""
        return panels_of(*self.stored("up")), panels_of(*self.stored("down"))

    def whole(self) -> Tensor:
        """Return the packed bytes in order of expert, as on one node: a copy if they are cut for several."""
        assert not self.is_mapped, "mapped weights have no storage of their own"
        if not self._nodes:
            return self.packed
        whole = huge_pages(self.nbytes)
        for expert in range(self.sizes.num_experts):
            self._native.join(self.address, expert, whole.data_ptr() + expert * self._native.expert_bytes)
        return whole

    def to_fill(self) -> Tensor:
        """Return memory for the packed bytes in order of expert. Call `take` once it is filled."""
        return huge_pages(self.nbytes) if self._nodes else self.whole()

    def take(self, filled: Tensor) -> None:
        """Compute from the bytes that were written into the memory of `to_fill()`."""
        if self._nodes:
            for expert in range(self.sizes.num_experts):
                self._native.shard(filled.data_ptr() + expert * self._native.expert_bytes, expert, self.address)

    def use_mapping(self, mapping: mmap.mmap) -> None:
        """Compute from packed bytes that are mapped read-only, instead of from storage of our own.

        They have the order of their file, for one node; the system places the pages.
        """
        if len(mapping) != self.nbytes:
            raise ValueError(f"expected {self.nbytes} packed bytes, found a mapping of {len(mapping)}")
        if self._nodes:
            self._bind(self._kernel, self._threads, self.sizes, ())
        with warnings.catch_warnings():  # PyTorch has no read-only tensors; this one is never written
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            self._use(torch.frombuffer(mapping, dtype=torch.uint8), mapped=True)

    def require_writable(self) -> None:
        """Raise `RuntimeError` for weights that are mapped read-only."""
        if self.is_mapped:
            raise RuntimeError("the experts are mapped read-only from a packed store")

    def load(self, expert: int, part: ExpertPart, values: Tensor) -> None:
        """Pack one part: gate and up are `(I, H)`, down is `(H, I)`, a bias is a row. Raises `ValueError` otherwise."""
        self.require_writable()
        source = values.detach().cpu()
        if source.dtype not in _NAMES:
            source = source.float()
        source = source.contiguous()
        matrix = self._matrix(expert, part, source.shape)
        self._native.pack(matrix, source.data_ptr(), _NAMES[source.dtype])

    def load_codes(self, expert: int, part: ExpertPart, codes: Tensor, scales: Tensor) -> None:
        """Pack one part from codes, (rows, columns) of one byte each, and fp32 scales (rows, groups), as they are.

        Raises `ValueError` if the kernel's weights are not codes, or for another shape, group or range.
        """
        self.require_writable()
        codes, scales = codes.cpu().contiguous(), scales.cpu().float().contiguous()
        matrix = self._matrix(expert, part, codes.shape)
        self._native.pack_codes(matrix, codes.data_ptr(), scales.data_ptr(), scales.shape[1])

    def blocks(self, part: ExpertPart) -> str | None:
        """Return the lower-case name of the GGUF blocks that a part is stored in, or `None`."""
        return self._native.blocks(part)

    def load_blocks(self, expert: int, part: ExpertPart, blocks: Tensor) -> None:
        """Pack one part from whole GGUF blocks of its type: uint8 (rows, bytes of a row), as a file stores them.

        Raises `ValueError` where the part is not stored in blocks, or of another shape.
        """
        self.require_writable()
        kind = self.blocks(part)
        if kind is None or blocks.dtype != torch.uint8 or blocks.dim() != 2:
            stored = f"`{part}` is stored in blocks of {kind}" if kind else f"`{part}` is not stored in blocks"
            raise ValueError(f"{stored}; found {blocks.dtype} of shape {tuple(blocks.shape)}")
        blocks = blocks.cpu().contiguous()
        self._native.pack_blocks(self._matrix(expert, part, blocks.shape), blocks.data_ptr(), kind)

    def unpack(self, expert: int, part: ExpertPart, shape: tuple[int, ...]) -> Tensor:
        """Return one part from packed form, in the kernel's dtype; a bias in the dtype of its sums."""
        values = torch.empty(shape, dtype=self.weight_dtype if part.endswith("_bias") else self.dtype)
        self._native.unpack(self._matrix(expert, part, shape), values.data_ptr())
        return values

    def _matrix(self, expert: int, part: ExpertPart, shape: Sequence[int]) -> Arguments:
        rows, columns = (1, *shape)[-2:]
        return {"packed": self.address, "expert": expert, "part": part, "rows": rows, "columns": columns}

    def inputs(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tensors of a call as the kernel reads them: contiguous, in its dtypes."""
        x, weights = x_TH.to(self.dtype), weights_TK.to(self.weight_dtype)
        return x.contiguous(), index_TK.contiguous(), weights.contiguous()

    def forward(
        self,
        x_TH: Tensor,
        index_TK: Tensor,
        weights_TK: Tensor,
        *,
        save: bool,
        lora: ExpertsLora = NO_LORA,
        interleaved: bool = False,
        context: StepContext | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer's output, and if `save` the bytes that backward needs beside the inputs.

        `interleaved`: the outputs of LoRA on gate_up alternate between gate and up. The recorder of `context` receives
        a call that saves nothing.
        """
        tokens = x_TH.shape[0]
        out_TH = torch.empty_like(x_TH)
        ranks, read = lora.ranks, lora.to(self.weight_dtype)
        saved = _SAVED.take(self._native.saved_bytes(tokens, *ranks)) if save else None
        arguments = self._arguments(read, saved, interleaved=interleaved)
        with KERNEL_LOCK, kernel_clock.timed(self.address, "forward", tokens, self.sizes, ranks):
            self._native.forward(self._engine, arguments(x_TH, index_TK, weights_TK, out_TH))
        if saved is None and context is not None:
            context.record_call(self._native.call, self._engine, arguments, (x_TH, index_TK, weights_TK), out_TH)
        return out_TH, saved

    def host_call(
        self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, out_TH: Tensor, lora: ExpertsLora,
        *, interleaved: bool,
    ) -> HostCall:  # fmt: skip
        """Return `forward` without gradients as a host function of CUDA, on the values of the tensors at its call.

        Another thread calls it, so it runs on threads that the library has for that purpose.
        """
        engine = self._kernel.engine(_beside_gpu(self._threads), self._nodes, separate=True)
        arguments = self._arguments(lora.to(self.weight_dtype), None, interleaved=interleaved)
        return bind_later(self._native.call, engine, arguments)((x_TH, index_TK, weights_TK), out_TH)

    def partial_call(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, out_TH: Tensor) -> HostCall:
        """Return `host_call` without LoRA, to which choices that are `COMPUTED_ELSEWHERE` add nothing.

        Its work is counted in intermediate units of the experts that it reads.
        """
        engine = self._kernel.engine(_beside_gpu(self._threads), self._nodes, separate=True)
        arguments = self._arguments(NO_LORA, None, interleaved=False)(x_TH, index_TK, weights_TK, out_TH)
        native = self._native.partial_call(engine, arguments, index_TK.numel(), self.sizes.intermediate)
        return HostCall(native, (self, x_TH, index_TK, weights_TK, out_TH))

    @property
    def library(self) -> KernelLibrary:
        """The library of the kernel."""
        return self._kernel.library

    @property
    def host_thread(self) -> NativeHostThread:
        """The class of threads that make calls of the kernel's library."""
        return self._kernel.host_thread

    def _arguments(
        self, lora: ExpertsLora, saved: Tensor | None, *, interleaved: bool
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor], Arguments]:
        """Return a function from hidden states, choices, weights and output to the fields of `ForwardArguments`."""

        def arguments(x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, out_TH: Tensor) -> Arguments:
            return {
                "packed": self.address, "hidden_states": x_TH.data_ptr(), "top_k_index": index_TK.data_ptr(),
                "top_k_weights": weights_TK.data_ptr(), "out": out_TH.data_ptr(), "tokens": x_TH.shape[0],
                "saved": 0 if saved is None else saved.data_ptr(), **lora_arguments(lora, interleaved=interleaved),
            }  # fmt: skip

        return arguments

    def backward(
        self,
        grad_TH: Tensor,
        routing: tuple[Tensor, Tensor],
        *,
        saved: Tensor | None,
        x_TH: Tensor | None,
        lora: ExpertsLora = NO_LORA,
        interleaved: bool = False,
        rows: SlotRows | None = None,
    ) -> tuple[Tensor, Tensor, ExpertsLora]:
        """Compute the gradients of hidden states, routing weights and LoRA's factors, and fill `rows`.

        `routing` are the chosen experts and their weights, both (T, K). Backward reads the bytes that forward saved, or
        else forward's input; the gradients of the factors need the input too.
        """
        assert saved is not None or x_TH is not None, "backward needs what forward saved, or its input"
        assert x_TH is not None or not any(lora.ranks), "the gradients of LoRA need the input"
        index_TK, weights_TK = routing
        grad_x_TH = torch.empty_like(grad_TH)
        grad_weights_TK = torch.empty_like(weights_TK)
        read, gradients = lora.to(self.weight_dtype), lora.zeros(self.weight_dtype)
        arguments: Arguments = {
            "packed": self.address, "top_k_index": index_TK.data_ptr(), "top_k_weights": weights_TK.data_ptr(),
            "saved": 0 if saved is None else saved.data_ptr(), "hidden_states": 0 if x_TH is None else x_TH.data_ptr(),
            "grad_out": grad_TH.data_ptr(), "grad_hidden_states": grad_x_TH.data_ptr(),
            "grad_top_k_weights": grad_weights_TK.data_ptr(), "tokens": grad_TH.shape[0],
            **lora_arguments(read, gradients, interleaved=interleaved),
        }  # fmt: skip
        if rows is not None:
            arguments["rows"] = {"d_first": rows.d_first.data_ptr(), "activated": rows.activated.data_ptr()}
        with KERNEL_LOCK, kernel_clock.timed(self.address, "backward", grad_TH.shape[0], self.sizes, lora.ranks):
            self._native.backward(self._engine, arguments)
        return grad_x_TH, grad_weights_TK, gradients

    @property
    def _engine(self) -> Engine:
        return self._kernel.engine(self._threads, self._nodes)

    def __deepcopy__(self, memo: dict[int, object]) -> PackedExperts:
        return self

    def __reduce__(self) -> NoReturn:
        message = "a compiled model cannot be pickled: its experts are packed"
        hint = "save the adapter, and load the base from its compiled folder"
        raise InputRefused(Diagnostic("L435", message, hint=hint))


def zeros_on_huge_pages(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return zeros in the dtype of `like`; on huge pages where they fill some, and on the CPU."""
    size = math.prod(shape) * like.itemsize
    if size < HUGE_PAGE or like.device.type != "cpu":
        return like.new_zeros(tuple(shape))
    return huge_pages(size).view(like.dtype).view(*shape)


def huge_pages(size: int) -> Tensor:
    """Allocate zeroed bytes that begin on a huge page. Memory is taken when it is written. Raises `MemoryError`."""
    whole = torch.frombuffer(anonymous(size + HUGE_PAGE, "weights"), dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + size]
