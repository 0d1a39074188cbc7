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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NoReturn, cast

import torch
from torch import Tensor

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.formats import STORED, WeightFormat
from ktc.foundation.host import NumaNode
from ktc.model.experts.anonymous_memory import HUGE_PAGE, anonymous
from ktc.model.experts.lora import NO_LORA, ExpertsLora, native_argument
from ktc.model.experts.saved_buffers import SavedBuffers
from ktc.model.kernels import kernel_clock
from ktc.model.kernels.form import ExpertPart, ExpertsSizes
from ktc.model.kernels.kernel_calls import HostCall, announce
from ktc.model.kernels.kernel_library import (
    TURNS,
    Engine,
    Kernel,
    KernelLibrary,
    nodes_for,
    permitted_threads,
)

DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_PANEL: Final = 32  # `kPanelWidth`
Numa = Literal["none", "shard"]  # whether weights are cut for the nodes of the machine that loads them
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


class PackedExperts:
    """Packed weights and the kernel that reads them. Frozen once loaded: copies of a model share them.

    `dtype` is that of hidden states and packed weights, `weight_dtype` that of routing weights.
    """

    def __init__(
        self,
        kernel: Kernel,
        threads: int,
        num_experts: int,
        hidden: int,
        intermediate: int,
        top_k: int,
        numa: Numa = "shard",
    ) -> None:
        threads = permitted_threads(threads)
        nodes = nodes_for(threads) if numa == "shard" else ()
        self._bind(kernel, threads, ExpertsSizes(num_experts, hidden, intermediate, top_k), nodes)
        self._hold(huge_pages(self._native.packed_bytes))
        if nodes:
            self._native.bind(self._packed, [node.number for node in nodes])

    @staticmethod
    @functools.cache
    def named(key: str) -> PackedExperts:
        """Return the kernel that a `key` names, without weights: `holding` adds them."""
        path, digest, entry, dtype, threads, sizes, nodes = json.loads(key)
        made = PackedExperts.__new__(PackedExperts)
        kernel = Kernel(KernelLibrary(Path(path), digest, ()), entry, dtype)
        of_nodes = tuple(NumaNode(number, tuple(cpus)) for number, cpus in nodes)
        made._bind(kernel, threads, ExpertsSizes(*sizes), of_nodes)
        return made

    def _bind(self, kernel: Kernel, threads: int, sizes: ExpertsSizes, nodes: tuple[NumaNode, ...]) -> None:
        self._native = kernel.instantiate(*sizes, max(1, len(nodes)))
        self._kernel, self._threads, self._sizes, self._nodes = kernel, threads, sizes, nodes
        self.dtype = DTYPES[kernel.dtype]
        self.weight_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        library = kernel.library
        of_nodes = [(node.number, node.cpus) for node in nodes]
        self.key = json.dumps((str(library.path), library.digest, kernel.entry, kernel.dtype, threads, sizes, of_nodes))

    def _hold(self, packed: Tensor, *, mapped: bool = False) -> None:
        self.packed, self._mapped = packed, mapped
        self._packed = packed.data_ptr()

    def holding(self, packed: Tensor) -> PackedExperts:
        """Return the same kernel on other packed bytes, which are only read."""
        other = self.__new__(type(self))
        vars(other).update(vars(self))
        other._hold(packed, mapped=True)
        return other

    def beside(self) -> PackedExperts:
        """Return the same kernel and threads with memory of its own, in which nothing is loaded."""
        other = self.__new__(type(self))
        vars(other).update(vars(self))
        other._hold(huge_pages(self._native.packed_bytes))
        if self._nodes:
            self._native.bind(other._packed, [node.number for node in self._nodes])
        return other

    def unloaded(self) -> PackedExperts:
        """Return the same kernel with memory of its own on one node, in which nothing is loaded."""
        other = self.__new__(type(self))
        other._bind(self._kernel, 1, self._sizes, ())
        other._hold(huge_pages(other._native.packed_bytes))
        return other

    def with_threads(self, threads: int) -> PackedExperts:
        """Return the same weights with exactly this many threads."""
        other = self.__new__(type(self))
        vars(other).update(vars(self))
        other._bind(self._kernel, threads, self._sizes, self._nodes)
        return other

    def saved_bytes(self, gate_up_rank: int, down_rank: int) -> int:
        """Count the bytes that forward saves for backward of each token, with LoRA of these ranks (0: none)."""
        return self._native.saved_bytes(1, gate_up_rank, down_rank)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights, expert after expert; cut for several nodes they take up to 2 MB each more."""
        return self._native.expert_bytes * self._sizes[0]

    @property
    def sizes(self) -> ExpertsSizes:
        """Experts, hidden, intermediate, experts per token."""
        return self._sizes

    @property
    def num_nodes(self) -> int:
        """Of NUMA: into how many shards the weights are cut."""
        return max(1, len(self._nodes))

    def coding(self, part: ExpertPart) -> tuple[str, int] | None:
        """Return the format of a part's codes and the size of their groups, `None` if it is stored as values."""
        return self._native.coding(part)

    def stored(self, part: ExpertPart) -> tuple[WeightFormat, int]:
        """Return the format that gate and up, or down, are stored in, and the size of its groups."""
        blocks = self.blocks(part)
        return self.coding(part) or (STORED[blocks].name if blocks else self._kernel.dtype, 0)

    def whole(self) -> Tensor:
        """Return the packed bytes in order of expert, as on one node: a copy if they are cut for several."""
        assert not self._mapped, "mapped weights have no storage of their own"
        if not self._nodes:
            return self.packed
        whole = huge_pages(self.nbytes)
        for expert in range(self._sizes[0]):
            self._native.join(self._packed, expert, whole.data_ptr() + expert * self._native.expert_bytes)
        return whole

    def to_fill(self) -> Tensor:
        """Return memory for the packed bytes in order of expert. Call `take` once it is filled."""
        return huge_pages(self.nbytes) if self._nodes else self.whole()

    def take(self, filled: Tensor) -> None:
        """Compute from what was put into `to_fill()`."""
        if self._nodes:
            for expert in range(self._sizes[0]):
                self._native.shard(filled.data_ptr() + expert * self._native.expert_bytes, expert, self._packed)

    def use_mapping(self, mapping: mmap.mmap) -> None:
        """Compute from packed bytes that are mapped read-only, instead of from storage of our own.

        They have the order of their file, for one node; the system places the pages.
        """
        if len(mapping) != self.nbytes:
            raise ValueError(f"expected {self.nbytes} packed bytes, found a mapping of {len(mapping)}")
        if self._nodes:
            self._bind(self._kernel, self._threads, self._sizes, ())
        with warnings.catch_warnings():  # PyTorch has no read-only tensors; this one is never written
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            self._hold(torch.frombuffer(mapping, dtype=torch.uint8), mapped=True)

    @property
    def is_mapped(self) -> bool:
        """Whether the bytes are another's, and only read."""
        return self._mapped

    def require_writable(self) -> None:
        """Raise `RuntimeError` for weights that are mapped read-only."""
        if self._mapped:
            raise RuntimeError("the experts are mapped read-only from a packed store")

    def load(self, expert: int, part: ExpertPart, values: Tensor) -> None:
        """Pack one part: gate and up are `(I, H)`, down is `(H, I)`, a bias is a row. Raises `ValueError` otherwise."""
        self.require_writable()
        source = values.detach().cpu()
        if source.dtype not in _NAMES:
            source = source.float()
        source = source.contiguous()
        rows, columns = (1, *source.shape)[-2:]
        name = _NAMES[source.dtype]
        self._native.pack(self._packed, expert, part, source.data_ptr(), name, rows, columns)

    def load_codes(self, expert: int, part: ExpertPart, codes: Tensor, scales: Tensor) -> None:
        """Pack one part from codes, (rows, columns) of one byte each, and fp32 scales (rows, groups), as they are.

        Raises `ValueError` if the kernel's weights are not codes, or for another shape, group or range.
        """
        self.require_writable()
        codes, scales = codes.cpu().contiguous(), scales.cpu().float().contiguous()
        (rows, columns), groups = codes.shape, scales.shape[1]
        self._native.pack_codes(self._packed, expert, part, codes.data_ptr(), scales.data_ptr(), rows, columns, groups)

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
        rows, row_bytes = blocks.shape
        self._native.pack_blocks(self._packed, expert, part, blocks.data_ptr(), kind, rows, row_bytes)

    def unpack(self, expert: int, part: ExpertPart, shape: tuple[int, ...]) -> Tensor:
        """Return one part from packed form, in the kernel's dtype; a bias in the dtype of its sums."""
        values = torch.empty(shape, dtype=self.weight_dtype if part.endswith("_bias") else self.dtype)
        rows, columns = (1, *shape)[-2:]
        self._native.unpack(self._packed, expert, part, values.data_ptr(), rows, columns)
        return values

    def forward(
        self,
        x_TH: Tensor,
        index_TK: Tensor,
        weights_TK: Tensor,
        *,
        save: bool,
        lora: ExpertsLora = NO_LORA,
        interleaved: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer's output, and if `save` the bytes that backward needs beside the inputs.

        `interleaved`: the outputs of LoRA on gate_up alternate between gate and up.
        """
        tokens = x_TH.shape[0]
        out_TH = torch.empty_like(x_TH)
        ranks, read = lora.ranks, lora.to(self.weight_dtype)
        saved = _SAVED.take(self._native.saved_bytes(tokens, *ranks)) if save else None
        with TURNS, kernel_clock.timed("forward", tokens, self._sizes, ranks):
            self._native.forward(
                self._engine,
                self._packed,
                x_TH.data_ptr(),
                index_TK.data_ptr(),
                weights_TK.data_ptr(),
                out_TH.data_ptr(),
                saved.data_ptr() if saved is not None else 0,
                tokens,
                *(native_argument(each, None, interleaved=interleaved) for each in read.products),
            )
        if saved is None:
            announce(
                lambda tensors, out: self._call(self._engine, tensors, out, read, interleaved=interleaved),
                (x_TH, index_TK, weights_TK),
                out_TH,
            )
        return out_TH, saved

    def host_call(
        self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, out_TH: Tensor, lora: ExpertsLora,
        *, interleaved: bool,
    ) -> HostCall:  # fmt: skip
        """Return `forward` without gradients as a host function of CUDA, on what these tensors hold when it is called.

        A thread of CUDA's calls it, for which there are threads of the library's own.
        """
        engine, tensors = self._kernel.engine(self._threads, self._nodes, own=True), (x_TH, index_TK, weights_TK)
        return self._call(engine, tensors, out_TH, lora.to(self.weight_dtype), interleaved=interleaved)

    def _call(
        self, engine: Engine, tensors: tuple[Tensor | None, ...], out_TH: Tensor, read: ExpertsLora,
        *, interleaved: bool,
    ) -> HostCall:  # fmt: skip
        x_TH, index_TK, weights_TK = cast("tuple[Tensor, Tensor, Tensor]", tensors)
        native = self._native.call(
            engine,
            self._packed,
            x_TH.data_ptr(),
            index_TK.data_ptr(),
            weights_TK.data_ptr(),
            out_TH.data_ptr(),
            x_TH.shape[0],
            *(native_argument(each, None, interleaved=interleaved) for each in read.products),
        )
        return HostCall(native, (self, x_TH, index_TK, weights_TK, out_TH, read))

    def backward(
        self,
        grad_TH: Tensor,
        index_TK: Tensor,
        weights_TK: Tensor,
        *,
        saved: Tensor | None,
        x_TH: Tensor | None,
        lora: ExpertsLora = NO_LORA,
        interleaved: bool = False,
        rows: SlotRows | None = None,
    ) -> tuple[Tensor, Tensor, ExpertsLora]:
        """Compute the gradients of hidden states, routing weights and LoRA's factors, and fill `rows`.

        They come from what forward saved or else from its input; those of the factors need the input too.
        """
        assert saved is not None or x_TH is not None, "backward needs what forward saved, or its input"
        assert x_TH is not None or not any(lora.ranks), "the gradients of LoRA need the input"
        grad_x_TH = torch.empty_like(grad_TH)
        grad_weights_TK = torch.empty_like(weights_TK)
        read, gradients = lora.to(self.weight_dtype), lora.zeros(self.weight_dtype)
        with TURNS, kernel_clock.timed("backward", grad_TH.shape[0], self._sizes, lora.ranks):
            self._native.backward(
                self._engine,
                self._packed,
                index_TK.data_ptr(),
                weights_TK.data_ptr(),
                saved.data_ptr() if saved is not None else 0,
                x_TH.data_ptr() if x_TH is not None else 0,
                grad_TH.data_ptr(),
                grad_x_TH.data_ptr(),
                grad_weights_TK.data_ptr(),
                grad_TH.shape[0],
                native_argument(read.gate_up, gradients.gate_up, interleaved=interleaved),
                native_argument(read.down, gradients.down, interleaved=interleaved),
                0 if rows is None else rows.d_first.data_ptr(),
                0 if rows is None else rows.activated.data_ptr(),
            )
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
