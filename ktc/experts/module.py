"""`FusedMoe`: the routed experts of one layer as one module with one autograd node.

In: hidden states and the router's choice, as Hugging Face's experts modules take them, and factors of LoRA. Out: the
weighted sum of the experts' outputs. Gradients go to the hidden states, the routing weights and the factors; the base
weights are frozen.
Without a kernel the module is its own PyTorch reference on plain tensors. Refused: an expert index out of range,
tensors of another shape than the layer's, a form nobody spells so, a forward before every expert is loaded.
"""

from __future__ import annotations

import copy
import mmap
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn

from ktc.experts import staging
from ktc.experts.autograd_op import fused_moe, native_factors
from ktc.experts.form import ExpertsForm, parse_form
from ktc.experts.kernel_library import Kernel, Part
from ktc.experts.lora import ExpertsLora
from ktc.experts.packed import Numa, PackedExperts
from ktc.experts.reference import fused_moe_reference
from ktc.experts.stock_layout import StockTensor, canonical_parts, parts_of, stock_names, stock_shape
from ktc.experts.streamed import ExpertStream, Prefill, compute

P = ParamSpec("P")
R = TypeVar("R")

__all__ = ["FusedMoe", "Part", "fused_moe_reference"]


def _never_traced(function: Callable[P, R]) -> Callable[P, R]:
    """The reference asks for data (which tokens has an expert), and Dynamo would try again at every call."""
    return cast("Callable[P, R]", torch.compiler.disable(function))


class FusedMoe(nn.Module):
    """Routed experts with frozen weights; forward takes `(T, H), (T, K) int64, (T, K)` and returns `(T, H)`.

    The tensors of the stock module (`stock_names`: `gate_up_proj` or, without a gate, `up_proj`; `down_proj`; their
    biases) can be asked for by name and have their stock shapes, as PEFT needs it, but are no registered parameters:
    optimizers, `state_dict` and `.to()` do not see them. With a kernel they are shapes without storage, and every value
    in them is NaN; `expert` gives the weights themselves.

    `.to(device)` moves nothing, and `.float()`, `.half()` or `.double()` change no weight: a kernel computes in the
    dtype it was built for (a warning says so) and returns the dtype of its hidden states.
    Copies share the weights, which are frozen.

    Args:
        form: what the experts compute and how their stock tensors are stored, or the spelling of it.
        kernel: an entry of the kernel library, or `None` for the PyTorch reference.
        threads: workers of the kernel's engine.
        dtype: what the parameters report; in reference mode also the dtype they are stored and computed in.
        numa: `shard` cuts packed weights for the NUMA nodes that the process may run on, `none` does not.
        activations: `keep` saves gate and up of every slot for backward, `recompute` computes them again.
        prefill: where calls with many tokens are computed, the weights sent there (`streamed_experts`).
    """

    gate_up_proj: nn.Parameter
    up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        top_k: int,
        form: str | ExpertsForm = "silu",
        *,
        kernel: Kernel | None = None,
        threads: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        activations: Literal["keep", "recompute"] = "keep",
        numa: Numa = "shard",
        prefill: Prefill | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.hidden, self.intermediate, self.top_k = num_experts, hidden, intermediate, top_k
        self.form = parse_form(form) if isinstance(form, str) else form
        self.activations: Literal["keep", "recompute"] = activations
        self.prefill = prefill
        self._experts = (
            PackedExperts(kernel, threads, num_experts, hidden, intermediate, top_k, numa)
            if kernel is not None
            else None
        )
        parts = parts_of(self.form)
        self._absent: set[tuple[int, Part]] = {(expert, part) for expert in range(num_experts) for part in parts}
        for name in stock_names(self.form):
            self._hold(name, stock_shape(self.form, name, num_experts, hidden, intermediate), dtype)

    def _hold(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Keep a weight as a plain attribute, unregistered; with a kernel, one element stands for all."""
        if self._experts:  # NaN, so that whoever computes with the stand-in sees it
            tensor = torch.full((), torch.nan, dtype=dtype).expand(shape)
        else:
            tensor = torch.zeros(shape, dtype=dtype)
        self.__dict__[name] = nn.Parameter(tensor, requires_grad=False)

    def _held(self, name: StockTensor) -> nn.Parameter:
        return cast("nn.Parameter", self.__dict__[name])

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The stock tensors by name, for whoever asks this module itself; a parent does not list them."""
        dot = "." if prefix else ""
        for name in stock_names(self.form):
            yield f"{prefix}{dot}{name}", self._held(name)
        yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedMoe:
        copied = self.__new__(type(self))
        memo[id(self)] = copied
        memo.update((id(self._held(name)), self._held(name)) for name in stock_names(self.form))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedMoe:
        if self._experts:
            held = self.down_proj.dtype
            wanted = fn(torch.empty(1, dtype=held)).dtype
            if wanted != held:
                kept = (
                    f"the experts' kernel computes in {self._experts.dtype} as before; only the rest becomes {wanted}"
                )
                warnings.warn(kept, stacklevel=2)
        return super()._apply(fn, recurse)

    @property
    def is_transposed(self) -> bool:
        """Whether the stock weights are `(E, inputs, outputs)`: PEFT asks."""
        return self.form.transposed

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights (0 in reference mode)."""
        return self._experts.nbytes if self._experts else 0

    def saved_bytes(self, first_rank: int = 0, down_rank: int = 0) -> int:
        """Bytes that a token's forward keeps for backward on the host, with LoRA of these ranks; an estimate of the
        reference."""
        adapted = 4 * self.top_k * (first_rank + down_rank) + self.down_proj.element_size() * self.hidden
        if self._experts and self.activations == "keep":
            kept = self._experts.saved_bytes(first_rank, down_rank)
        else:
            kept = 0 if self._experts else 5 * self.down_proj.element_size() * self.top_k * self.intermediate
        return kept + adapted

    def load_expert(self, expert: int, part: Part, tensor: Tensor) -> None:
        """Store one part of one expert: gate and up are `(I, H)`, down is `(H, I)`, biases `(I,)` and `(H,)`.

        Any float dtype. Raises `ValueError` for another shape, or a part that experts of this form lack.
        """
        parts = parts_of(self.form)
        if part not in parts:
            raise ValueError(f"experts of the form `{self.form}` have no `{part}`, only {', '.join(parts)}")
        expected = self._shape(part)
        if tuple(tensor.shape) != expected:
            raise ValueError(f"expert {expert}, `{part}`: expected shape {expected}, found {tuple(tensor.shape)}")
        if self._experts:
            self._experts.load(expert, part, tensor)
        else:
            self._reference_part(expert, part).copy_(tensor.detach())
        self._absent.discard((expert, part))

    def takes_codes(self, part: Part, method: str, group: int) -> bool:
        """Whether the kernel multiplies such codes of a part, so that they can be loaded as they are."""
        return self._experts is not None and self._experts.coding(part) == (method, group) and not self.form.transposed

    def load_codes(self, expert: int, part: Part, codes: Tensor, scales: Tensor) -> None:
        """Store one part of one expert without a rounding: a code per weight, a scale per row and group.

        Raises `ValueError` for another shape, a code out of range, or a scale that the format cannot hold.
        """
        expected = self._shape(part)
        if tuple(codes.shape) != expected:
            raise ValueError(f"expert {expert}, `{part}`: expected shape {expected}, found {tuple(codes.shape)}")
        self._kernel_experts().load_codes(expert, part, codes, scales)
        self._absent.discard((expert, part))

    def takes_blocks(self, part: Part, type_name: str) -> bool:
        """Whether the kernel multiplies a part in GGUF blocks of this type, so that they can be loaded as they are."""
        return self._experts is not None and self._experts.blocks(part) == type_name

    def load_blocks(self, expert: int, part: Part, blocks: Tensor) -> None:
        """Store one part of one expert from uint8 rows of whole GGUF blocks, (I, bytes of H weights) or (H, ... of I).

        Raises `ValueError` for another shape, or where the kernel takes no blocks.
        """
        self._kernel_experts().load_blocks(expert, part, blocks)
        self._absent.discard((expert, part))

    @property
    def packed_storage(self) -> memoryview:
        """The packed bytes of all experts, one after the other. Raises `ValueError` in reference mode."""
        return memoryview(self._kernel_experts().whole().numpy().data)

    def fill_packed(self, fill: Callable[[memoryview], None]) -> None:
        """All experts are what `fill` puts where it is told to, in the order of `packed_storage`."""
        experts = self._kernel_experts()
        filled = experts.to_fill()
        fill(memoryview(filled.numpy().data))
        experts.take(filled)
        self._absent.clear()

    def take_packed(self, mapping: mmap.mmap) -> None:
        """All experts are in a read-only mapping of bytes in the order of `packed_storage`."""
        self._kernel_experts().use_mapping(mapping)
        self._absent.clear()

    def _kernel_experts(self) -> PackedExperts:
        if self._experts is None:
            raise ValueError("experts without a kernel have no packed form")
        return self._experts

    def expert(self, expert: int, part: Part) -> Tensor:
        """One part of one expert, as it was loaded (a copy, in the dtype it is computed in)."""
        if self._experts:
            return self._experts.unpack(expert, part, self._shape(part))
        return self._reference_part(expert, part).clone(memory_format=torch.contiguous_format)

    def _shape(self, part: Part) -> tuple[int, ...]:
        rows, columns = self.intermediate, self.hidden
        if part.startswith("down"):
            rows, columns = columns, rows
        return (rows,) if part.endswith("_bias") else (rows, columns)

    def _reference_part(self, expert: int, part: Part) -> Tensor:
        """A view of the stock tensor it lies in."""
        for name in stock_names(self.form):
            held = dict(canonical_parts(self.form, name, self._held(name).detach()[expert]))
            if part in held:
                return held[part]
        raise KeyError(part)

    def missing(self) -> tuple[tuple[int, Part], ...]:
        """The (expert, part) pairs that were never loaded, in order of expert."""
        parts = parts_of(self.form)
        return tuple(sorted(self._absent, key=lambda pair: (pair[0], parts.index(pair[1]))))

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, lora: ExpertsLora | None = None
    ) -> Tensor:
        if self._absent:
            raise RuntimeError(
                f"{len(self._absent)} expert weights were never loaded, the first is {self.missing()[0]}"
            )
        self._check(hidden_states, top_k_index, top_k_weights)
        if lora is not None:
            self._check_lora(lora)
        if self._experts and self.prefill and self._goes_elsewhere(hidden_states.shape[0]):
            out_TH = self._run_elsewhere(self._experts, self.prefill, hidden_states, top_k_index, top_k_weights, lora)
            return out_TH.to(hidden_states.device, hidden_states.dtype)
        if hidden_states.is_cuda and hidden_states.requires_grad and not torch.compiler.is_compiling():
            return self._staged(hidden_states, top_k_index, top_k_weights, lora)
        x_TH, index_TK, weights_TK = hidden_states.cpu(), top_k_index.cpu(), top_k_weights.cpu()
        if self._experts:
            out_TH = self._run_kernel(self._experts, x_TH, index_TK, weights_TK, lora or ExpertsLora())
        else:
            out_TH = self._run_reference(x_TH, index_TK, weights_TK, lora)
        return out_TH.to(hidden_states.device)

    def _staged(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora | None) -> Tensor:
        """The same with states and gradients going through pinned memory: training moves megabytes each time."""
        host_TH, index, weights = (staging.to_host((tensor,)) for tensor in (x_TH, index_TK, weights_TK))
        out_TH = self.forward(host_TH, index, weights, lora)
        return staging.to_device(staging.pinned(out_TH), x_TH.device)

    def computed_on(self, tokens: int) -> torch.device:
        """Where a call with so many tokens is computed, whatever device its tensors are on."""
        return self.prefill.device if self.prefill and self._goes_elsewhere(tokens) else torch.device("cpu")

    def _goes_elsewhere(self, tokens: int) -> bool:
        return self._experts is not None and self.prefill is not None and tokens >= self.prefill.tokens

    @_never_traced
    def _run_elsewhere(
        self, experts: PackedExperts, prefill: Prefill, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor,
        lora: ExpertsLora | None,
    ) -> Tensor:  # fmt: skip
        stream = ExpertStream(experts, self.form, prefill.device)
        return compute(stream, x_TH.to(experts.dtype), index_TK, weights_TK, lora or ExpertsLora())

    @_never_traced
    def _run_reference(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora | None) -> Tensor:
        first, down, *biases = (self._held(name) for name in stock_names(self.form))
        return fused_moe_reference(x_TH, index_TK, weights_TK, first, down, self.form, *biases, lora=lora)

    def _run_kernel(
        self, experts: PackedExperts, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, lora: ExpertsLora
    ) -> Tensor:
        wants_grad = x_TH.requires_grad or weights_TK.requires_grad or lora.requires_grad
        wants_grad = wants_grad and torch.is_grad_enabled()
        x, weights = x_TH.to(experts.dtype).contiguous(), weights_TK.to(experts.weight_dtype).contiguous()
        index, interleaved = index_TK.contiguous(), self.form.interleaved
        if wants_grad or torch.compiler.is_compiling():
            keep = wants_grad and self.activations == "keep"
            out_TH = fused_moe(experts, x, index, weights, lora, interleaved=interleaved, keep=keep)
        else:
            factors = native_factors(lora, experts, interleaved, gradients=False)
            out_TH, _ = experts.forward(x, index, weights, save=False, lora=factors)
        return out_TH.to(x_TH.dtype)

    def _check(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> None:
        tokens = x_TH.shape[0]
        expected = ((tokens, self.hidden), (tokens, self.top_k), (tokens, self.top_k))
        found = tuple(tuple(tensor.shape) for tensor in (x_TH, index_TK, weights_TK))
        if found != expected:
            raise ValueError(f"expected hidden states, indices and weights of shapes {expected}, found {found}")
        if index_TK.dtype != torch.int64:
            raise ValueError(f"`top_k_index` must be int64, found {index_TK.dtype}")

    def _check_lora(self, lora: ExpertsLora) -> None:
        first, hidden = stock_names(self.form)[0], self.hidden
        if lora.first is not None:
            outputs = self.intermediate * (2 if self.form.gated else 1)
            lora.first.check(first, self.num_experts, hidden, outputs)
        if lora.down is not None:
            lora.down.check("down_proj", self.num_experts, self.intermediate, hidden)

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, hidden={self.hidden}, intermediate={self.intermediate}, "
            f"top_k={self.top_k}, form={self.form}, {'packed' if self._experts else 'reference'}"
        )
