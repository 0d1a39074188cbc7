"""`StoredLinear`: a frozen linear layer whose weight is the blocks of a GGUF file, multiplied as stored.

In: bf16 activations. Out: the product with the blocks' weights, and the gradients of the input and of a bias that
trains. Sums are in fp32. The CPU's kernels, and a GPU's for few rows, round once. For some rows a GPU rounds the
product and its sum with the bias, and for many it rounds the weights to bf16 first (`coded_weight.py`). PEFT wraps it
as any `nn.Linear`: its `weight` has the shape and dtype of the stock one, and no values.
Refused: blocks of another type or size (ValueError), input of another dtype or device (RuntimeError), copies (L449).
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import host
from ktc.model.experts.backends.tracing import never_traced
from ktc.model.experts.layouts.coded_matrices import CodedMatrices
from ktc.model.experts.layouts.packed import huge_pages
from ktc.model.kernels.kernel_library import KERNEL_LOCK, Arguments, Kernel, NativePackedLinear, permitted_threads
from ktc.model.kernels.step_context import StepContext
from ktc.model.linears.absent_weight import AbsentWeight, LinearWithoutWeight
from ktc.model.linears.coded_weight import CodedWeight
from ktc.model.linears.gemv import address, threads_for

_CPU: Final = torch.device("cpu")
_BAND: Final = 8192  # rows that a thread packs: whole panels


class StoredLinear(LinearWithoutWeight):
    """`(..., in_features) -> (..., out_features)` in bf16. `format` is that of the blocks."""

    kernel: Kernel
    format: str
    threads: int
    packed: Tensor | None
    step_context: StepContext
    device: torch.device

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, kernel: Kernel, weight_format: str, threads: int, device: torch.device = _CPU
    ) -> StoredLinear:  # fmt: skip
        """Return a layer on a device with the bias of `linear` and a weight that `load_blocks` brings."""
        made = cls(linear.in_features, linear.out_features, bias=False, device="meta", dtype=linear.weight.dtype)
        del made.weight
        shape = (linear.out_features, linear.in_features)
        made.__dict__["weight"] = AbsentWeight.of(shape, linear.weight.dtype, device)
        made.register_parameter("bias", linear.bias)
        made.kernel, made.format, made.packed, made.device = kernel, weight_format, None, device
        made.threads, made.step_context = permitted_threads(threads), StepContext()
        return made.train(linear.training)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weight."""
        return self._native.packed_bytes(self.in_features, self.out_features)

    def load_blocks(self, blocks: Tensor) -> None:
        """Pack the whole weight: uint8 (out_features, bytes of a row), as the file stores it."""
        on_host = None if self._on_gpu else self.packed
        packed = huge_pages(self.packed_bytes) if on_host is None else on_host
        blocks = blocks.contiguous()
        if blocks.dtype != torch.uint8 or blocks.dim() != 2 or blocks.shape[0] != self.out_features:
            raise ValueError(f"expected blocks of {self.out_features} rows, found {tuple(blocks.shape)}")
        self._pack(packed, blocks)
        if not self._on_gpu or self.packed is None:
            self.packed = packed.to(self.device)
        else:
            self.packed.copy_(packed)
        self.loads.loaded("weight")

    def _pack(self, packed: Tensor, blocks: Tensor) -> None:
        """Pack rows by bands of whole panels, on several threads: a head has hundreds of thousands."""
        native = self._native

        def pack(first: int) -> None:
            band = blocks[first : first + _BAND]
            begin = packed.data_ptr() + native.packed_bytes(self.in_features, first)
            native.pack(begin, band.data_ptr(), *band.shape)

        bands = range(0, self.out_features, _BAND)
        with ThreadPoolExecutor(min(len(bands), host.usable_threads()), "ktc-packing") as pool:
            list(pool.map(pack, bands))

    def stay_on_host(self) -> None:
        """Keep the blocks in host memory, in a layer that `copy_from` reads and that is never called."""
        self.device = _CPU

    def copy_from(self, other: StoredLinear) -> None:
        """Load the weight of a layer of the same sizes and format into the same memory."""
        assert self.packed is not None and other.packed is not None, "both layers are loaded"
        self.packed.copy_(other.packed)
        self.loads.loaded("weight")

    def dequantised(self) -> Tensor:
        """Return the weight (out_features, in_features), each value rounded to bf16."""
        if self._on_gpu:
            return self._coded.decoded()
        weight = torch.empty(self.out_features, self.in_features, dtype=torch.bfloat16)
        self._native.unpack(self._loaded().data_ptr(), weight.data_ptr(), self.in_features, self.out_features)
        return weight

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features). Raise `RuntimeError` for input of another dtype or device."""
        if torch.is_autocast_enabled(self.device.type):
            input = input.to(torch.get_autocast_dtype(self.device.type))
        if input.dtype != torch.bfloat16:
            raise RuntimeError(f"a linear layer in {self.format} multiplies bf16, found {input.dtype}")
        if not self._is_here(input.device):
            where = "the CPU" if self.device.type == "cpu" else f"`{self.device}`"
            message = f"a linear layer in {self.format} is multiplied on {where}, found an input on `{input.device}`"
            raise RuntimeError(f"{message}: leave the model where `ktc.load` puts it")
        bias = cast("Tensor | None", self.bias)
        if torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad)):
            return cast("Tensor", _Frozen.apply(input, bias, self))
        return self._product(input)

    @never_traced
    def _product(self, input: Tensor) -> Tensor:
        if self._on_gpu:
            bias = cast("Tensor | None", self.bias)
            return self._coded.times(input.detach(), None if bias is None else bias.detach().to(input.dtype))
        x = input.detach().contiguous()
        out = x.new_empty((*x.shape[:-1], self.out_features))
        packed = self._loaded()
        bias = cast("Tensor | None", self.bias)
        native, engine = self.kernel.opened(threads_for(packed.nbytes, self.threads))
        # referenced until the kernel has read it; `.to(device)` of the model moves it
        bias = None if bias is None else bias.detach().to("cpu", torch.bfloat16).contiguous()
        with KERNEL_LOCK:
            native.forward(engine, packed_arguments(x, packed, bias, out))
        self.step_context.record_call(native.call, engine, packed_arguments, (x, packed, bias), out)
        return out

    @property
    def _native(self) -> NativePackedLinear:
        return self.kernel.opened(1)[0]

    def _is_here(self, device: torch.device) -> bool:
        return device.type == self.device.type == "cpu" or device == self.device

    @property
    def _on_gpu(self) -> bool:
        return self.device.type != "cpu"

    @property
    def matrix(self) -> CodedMatrices:
        """The weight on a GPU as its kernels multiply it."""
        return self._coded.matrix

    @property
    def _coded(self) -> CodedWeight:
        return CodedWeight.of(self._loaded(), self.format, self.out_features, self.in_features)

    def _loaded(self) -> Tensor:
        self.loads.require_processed(self.loads.generation)
        if self.packed is None:
            raise RuntimeError("the layer has no weight yet: `load_blocks` brings it")
        return self.packed

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse (L449): a copy would train, or save, weights that are blocks."""
        message = "a linear layer that is multiplied as stored cannot be copied: its weight is blocks of a GGUF file"
        raise InputRefused(Diagnostic("L449", message, hint="write `kt_linear(gemv, prefill = torch)`"))

    def extra_repr(self) -> str:
        return super().extra_repr() + f", {self.format} as stored"


def packed_arguments(x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> Arguments:
    """Return the fields of `PackedLinearArguments`: x (..., inputs) and out (..., outputs)."""
    return {
        "x": x.data_ptr(), "packed": packed.data_ptr(), "bias": address(bias), "out": out.data_ptr(),
        "rows": math.prod(x.shape[:-1]), "inputs": x.shape[-1], "outputs": out.shape[-1],
    }  # fmt: skip


class _Frozen(torch.autograd.Function):
    """The product; backward multiplies with the weights rounded to bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: StoredLinear) -> Tensor:
        ctx.layer, ctx.bias_dtype = layer, None if bias is None else bias.dtype
        return layer._product(x)  # pyright: ignore[reportPrivateUsage]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        needs_x, needs_bias, _ = ctx.needs_input_grad
        of_x = grad.to(torch.bfloat16) @ cast("StoredLinear", ctx.layer).dequantised() if needs_x else None
        of_bias = (
            grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        )
        return of_x, of_bias, None
