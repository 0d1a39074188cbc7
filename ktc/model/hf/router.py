"""A stock router whose routing a kernel computes: what `fused` puts in the model, and its reference in PyTorch.

In: the stock module, which returns logits, weights and expert numbers, and its `RouterForm`. Out: the same module. Its
linear layer stays PyTorch's, so adapters train on it, and hooks on the module see the stock results. Calls that the
form does not cover run the stock code: traced ones, those of a recorded step, and those under autocast.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.model.hf.gpu_router import GpuRouting, has_kernel
from ktc.model.hf.patching import Patch, stock_class
from ktc.model.kernels.kernel_library import KERNEL_LOCK, Engine, Kernel
from ktc.model.kernels.router_spec import Dtype, RouterForm
from ktc.model.kernels.step_context import StepContext

DTYPES: Final[Mapping[Dtype, torch.dtype]] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_COMPARED: Final = 64  # rows in which a GPU's kernel is compared with PyTorch
_BOUND: Final = 1e-5  # of the relative error of its weights in fp32
_TRIED: Final = 7  # rows that a stock router is run on
_LOGITS_PER_THREAD: Final = 8192  # with fewer, waking a thread costs more than it saves


# The reference -------------------------------------------------------------------------------------------------------
def route(form: RouterForm, logits: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return weights (T, k) of `dtype` and expert numbers (T, k), in the order of `form`.

    Differentiable in logits (T, E).
    """
    scores, compared = compare(form, logits, bias)
    indices = torch.topk(compared, form.top_k, dim=-1, sorted=form.in_order).indices
    return weigh(form, scores, compared, indices, dtype), indices


def compare(form: RouterForm, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the scores (T, E), or with `late` the logits, and what experts are chosen by (T, E)."""
    wide = logits.to(torch.float32) if form.scores else logits
    scores = wide if form.late else _scored(form, wide)
    compared = scores.to(torch.float32) if form.compared else scores
    if bias is not None:
        compared = compared + bias.to(compared.dtype)
    if form.top_groups == form.groups:
        return scores, compared
    rank = group_ranks(form, compared)
    best = rank.topk(form.top_groups, dim=-1).indices
    kept = torch.zeros_like(rank, dtype=torch.bool).scatter(-1, best, value=True)
    outside = -torch.inf if form.limited is None else form.limited
    grouped = _grouped(form, compared)
    return scores, grouped.masked_fill(~kept.unsqueeze(-1), outside).flatten(-2)


def group_ranks(form: RouterForm, compared: Tensor) -> Tensor:
    """Return what groups are chosen by (T, groups), from values that no limit was applied to."""
    grouped = _grouped(form, compared)
    return grouped.topk(2, dim=-1).values.sum(-1) if form.group_score == "two_greatest" else grouped.amax(-1)


def _grouped(form: RouterForm, values: Tensor) -> Tensor:
    return values.reshape(*values.shape[:-1], form.groups, form.num_experts // form.groups)


def weigh(form: RouterForm, scores: Tensor, compared: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights (T, k) of chosen experts, from what `compare` returns."""
    picked = (compared if form.takes_limited else scores).gather(-1, indices)
    picked = _scored(form, picked) if form.late else picked
    picked = picked * form.picked_scale if form.picked_scale != 1 else picked
    if form.total != "none":
        total = picked.sum(-1, keepdim=True)
        constant = form.total_constant
        picked = picked / (total + constant if form.total == "plus" else total.clamp_min(constant))
    return (picked * form.scale if form.scale != 1 else picked).to(dtype)


def _scored(form: RouterForm, logits: Tensor) -> Tensor:
    if form.scoring == "softmax":
        return torch.softmax(logits, -1)
    return torch.sigmoid(logits) if form.scoring == "sigmoid" else functional.softplus(logits).sqrt()


# The kernel ----------------------------------------------------------------------------------------------------------
Native = tuple[Any, Engine]  # the functions of a router's kernel, and the engine of their calls


def kernel_forward(
    native: Native, form: RouterForm, logits: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return what `route` does, for contiguous logits of the kernel's dtype and a bias in fp32."""
    functions, engine = native
    weights = logits.new_empty((logits.shape[0], form.top_k), dtype=dtype)
    indices = logits.new_empty((logits.shape[0], form.top_k), dtype=torch.int64)
    with KERNEL_LOCK:
        functions.forward(engine, {
            "logits": logits.data_ptr(), "bias": _address(bias), "weights": weights.data_ptr(),
            "indices": indices.data_ptr(), "rows": logits.shape[0],
        })  # fmt: skip
    return weights, indices


def kernel_backward(native: Native, logits: Tensor, bias: Tensor | None, indices: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of the logits from that of the weights, which is contiguous and of their dtype."""
    functions, engine = native
    result = torch.empty_like(logits)
    with KERNEL_LOCK:
        functions.backward(engine, {
            "logits": logits.data_ptr(), "bias": _address(bias), "indices": indices.data_ptr(),
            "weights_gradient": gradient.data_ptr(), "logits_gradient": result.data_ptr(), "rows": logits.shape[0],
        })  # fmt: skip
    return result


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class _Route(torch.autograd.Function):
    """The kernel, with its gradient. A second derivative is refused, as that of experts."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, bias: Tensor | None, native: Native, form: RouterForm, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        weights, indices = kernel_forward(native, form, logits, bias, dtype)
        ctx.save_for_backward(logits, bias, indices)
        ctx.native = native
        ctx.mark_non_differentiable(indices)
        return weights, indices

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, bias, indices = ctx.saved_tensors
        return kernel_backward(ctx.native, logits, bias, indices, gradients[0].contiguous()), None, None, None, None


@functools.cache
def check_gpu_routing(form: RouterForm, device: torch.device) -> None:
    """Compare the kernel with PyTorch in fp32, once for each form and device. Raises HostLacks (H249)."""
    if not has_kernel(device):
        return
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(_COMPARED, form.num_experts, generator=generator).to(device)
    bias = torch.randn(form.num_experts, generator=generator).to(device) / 4 if form.corrected else None
    with torch.no_grad():
        weights, chosen = GpuRouting(device.type)(form, logits, bias, torch.float32)
        scores, compared = compare(form, logits, bias)
        best = compared.topk(form.top_k, dim=-1).values
        expected = weigh(form, scores, compared, chosen, torch.float32)
    # The kernel may take another one of two experts whose scores are equal but for rounding.
    is_best = torch.allclose(compared.gather(-1, chosen), best, rtol=_BOUND, atol=1e-6)
    error = float((weights - expected).square().sum() / expected.square().sum().clamp_min(1e-30)) ** 0.5
    if not is_best or not error <= _BOUND:
        fault = f"its weights have a relative error of {error:.2g}" if is_best else "it chooses other experts"
        message = f"the routing of {form} is wrong on {device}: {fault}"
        hint = "use the tested versions of torch and Triton (constraints.txt), or leave `fused` out"
        raise HostLacks(Diagnostic("H249", message, hint=hint))


# The module ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class RouterLayout:
    """Where a stock router has its tensors, and its results.

    `weight` and `bias` are those of its linear layer, which is at `layer`, or "" where the router multiplies itself.
    `correction` is the bias of the choice; it is "" where there is none, or where it is `passed` with each call.
    `results` has the stock results in their order: "logits", "weights", "indices". `hidden` is the dtype of hidden
    states in the compiled model.
    """

    layer: str
    weight: str
    bias: str
    correction: str
    passed: bool
    hidden: Dtype
    results: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Routing:
    """A router's form and layout, its kernel and the most threads that it may use. Without a kernel PyTorch routes.

    A model that has the kernel of a CPU may be moved to a GPU, where `on_gpu` computes calls without gradients.
    `multiply` is F.linear, or another product with the router's own weight.
    """

    form: RouterForm
    layout: RouterLayout
    kernel: Kernel | None
    threads: int
    on_gpu: GpuRouting = field(default_factory=GpuRouting)
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = functional.linear

    def logits(self, module: nn.Module, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, as the stock module computes them."""
        layout, x = self.layout, hidden.flatten(0, -2)
        x = x.float() if self.form.logits else x
        if layout.layer:
            return module.get_submodule(layout.layer)(x)
        weight: Tensor = getattr(module, layout.weight)
        bias: Tensor | None = getattr(module, layout.bias) if layout.bias else None
        if self.form.logits:
            weight, bias = weight.float(), None if bias is None else bias.float()
        return self.multiply(x, weight, bias)

    def __call__(self, logits: Tensor, bias: Tensor | None, hidden: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return weights (T, k) and expert numbers (T, k) for logits (T, E) and a bias (E,) of the choice.

        `hidden` is the dtype of the hidden states.
        """
        dtype = hidden if self.form.weights else torch.float32 if self.form.scores else logits.dtype
        if self.kernel is not None and self.on_gpu.serves(logits):
            return self.on_gpu(self.form, logits, bias, dtype)
        if self.kernel is None or not self._serves(logits, hidden):
            return route(self.form, logits, bias, dtype)
        bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        native = self.kernel.opened(min(self.threads, max(1, logits.numel() // _LOGITS_PER_THREAD)))
        logits = logits.contiguous()
        if torch.is_grad_enabled() and logits.requires_grad:
            return cast("tuple[Tensor, Tensor]", _Route.apply(logits, bias, native, self.form, dtype))
        return kernel_forward(native, self.form, logits, bias, dtype)

    def _serves(self, logits: Tensor, hidden: torch.dtype) -> bool:
        """Return whether the kernel, which was built for these dtypes, takes the logits."""
        assert self.kernel is not None
        plain = type(logits) is Tensor and logits.device.type == "cpu"
        return (
            plain and logits.dtype == DTYPES[cast("Dtype", self.kernel.dtype)] and hidden == DTYPES[self.layout.hidden]
        )

    def correction(self, module: nn.Module, passed: tuple[Tensor, ...]) -> Tensor | None:
        """Return the bias (E,) of the choice, of the module or passed with the call; None without one."""
        path, _, name = self.layout.correction.rpartition(".")
        bias = getattr(module.get_submodule(path), name) if name else passed[0] if passed else None
        return None if bias is None else cast("Tensor", bias).flatten()


class FusedRouter(Patch):
    """The code of a router whose routing is `routing`."""

    routing: Routing
    step_context: StepContext

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the results of the stock module for hidden states (..., H), in their order."""
        module, routing = cast("nn.Module", self), self.routing
        if kwargs or len(args) != routing.layout.passed or _is_stock_alone(hidden_states, self.step_context):
            return cast("Any", super()).forward(hidden_states, *args, **kwargs)
        logits = routing.logits(module, hidden_states)
        weights, indices = routing(logits, routing.correction(module, args), hidden_states.dtype)
        results = {"logits": logits, "weights": weights, "indices": indices}
        return tuple(results[name] for name in routing.layout.results)


def fused_router(module: nn.Module, routing: Routing) -> nn.Module:
    """Return `module` itself, patched. Raises ValueError where its tensors are not those of `routing`."""
    layout, form = routing.layout, routing.form
    try:
        owner = module.get_submodule(layout.layer)
        weight = getattr(owner, layout.weight)
        others = [module.get_parameter(layout.bias)] if layout.bias else []
        others += [bias for bias in (routing.correction(module, ()),) if bias is not None]
    except AttributeError as error:
        raise ValueError(str(error)) from error
    if weight.shape[0] != form.num_experts or any(other.numel() != form.num_experts for other in others):
        raise ValueError(f"its `{layout.weight}` is {list(weight.shape)}, of {form.num_experts} experts")
    FusedRouter.put_on(module)
    patched = cast("Any", module)
    patched.routing, patched.step_context = routing, StepContext()
    return module


class GraphRouting(nn.Module):
    """The routing in a rewritten graph: logits (T, E) and a bias (E,) become weights and expert numbers.

    It has the tensors and the children of `holder`, which other nodes of the graph name.
    """

    def __init__(self, form: RouterForm, holder: nn.Module) -> None:
        super().__init__()
        self.form = form
        for name, child in holder.named_children():
            self.add_module(name, child)
        for name, tensor in holder.named_parameters(recurse=False):
            self.register_parameter(name, tensor)
        for name, tensor in holder.named_buffers(recurse=False):
            self.register_buffer(name, tensor)

    def forward(self, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights (T, k), of the dtype of the scores, and expert numbers (T, k)."""
        bias = None if bias is None else bias.flatten()
        return route(self.form, logits, bias, torch.float32 if self.form.scores else logits.dtype)


# The stock results ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Module:
    """A module that stands for its class."""

    module: nn.Module = field(compare=False, hash=False)


def stock_results(module: nn.Module, form: RouterForm, layout: RouterLayout) -> tuple[str, ...]:
    """Return what a stock router returns, in its order: "logits", "weights" and "indices".

    A copy of it with random weights is run on the CPU, also while modules are made elsewhere, and its results are
    compared with those of the form by their values. Raises ValueError where it returns something else.
    """
    with torch.device("cpu"):
        return _stock_results(stock_class(module), form, layout, _Module(module))


@functools.lru_cache(maxsize=64)
def _stock_results(_: type, form: RouterForm, layout: RouterLayout, stock: _Module) -> tuple[str, ...]:
    module = copy.deepcopy(stock.module).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(17)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_(0, 0.3, generator=generator)
    routing = Routing(form, layout, None, 1)
    weight: Tensor = getattr(module.get_submodule(layout.layer), layout.weight)
    hidden = torch.randn(_TRIED, weight.shape[1], generator=generator)
    passed = (torch.randn(form.num_experts, generator=generator),) * layout.passed
    with torch.no_grad():
        results = _ran(module, hidden, passed)
        logits = routing.logits(module, hidden)
        weights, indices = routing(logits, routing.correction(module, passed), hidden.dtype)
    if not isinstance(results, tuple):
        raise ValueError("it does not return its weights and its choice")
    returned = cast("tuple[object, ...]", results)
    named = {"logits": logits, "weights": _by_expert(weights, indices), "indices": indices.sort(-1).values}
    chosen = next(
        (t for t in returned if isinstance(t, Tensor) and t.shape == indices.shape and not t.is_floating_point()), None
    )
    if chosen is None:
        raise ValueError("it does not return the chosen experts")
    return tuple(_name_of(value, named, chosen) for value in returned)


def _ran(module: nn.Module, hidden: Tensor, passed: tuple[Tensor, ...]) -> object:
    """Return the results of a module that takes rows (T, H), or sequences (b, s, H)."""
    try:
        return module(hidden, *passed)
    except Exception:  # noqa: BLE001 - foreign code raises anything
        try:
            return module(hidden.unsqueeze(0), *passed)
        except Exception as error:
            raise ValueError(f"it does not run alone ({type(error).__name__})") from error


def _name_of(value: object, named: Mapping[str, Tensor], chosen: Tensor) -> str:
    """Return the name of the result that equals a value."""
    if isinstance(value, Tensor):
        for name, wanted in named.items():
            if value.shape != wanted.shape or value.is_floating_point() != wanted.is_floating_point():
                continue
            ordered = (
                value if name == "logits" else value.sort(-1).values if value is chosen else _by_expert(value, chosen)
            )
            if torch.allclose(ordered.double(), wanted.double(), rtol=1e-4, atol=1e-6):
                return name
    raise ValueError("it returns something else than logits, weights and a choice, or other values")


def _by_expert(weights: Tensor, indices: Tensor) -> Tensor:
    return weights.gather(-1, indices.argsort(-1))


def _is_stock_alone(hidden: Tensor, context: StepContext) -> bool:
    """Return whether stock code computes the call: it is traced, recorded as operations, or under autocast."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    return traced or context.recorder is not None or torch.is_autocast_enabled(hidden.device.type)
