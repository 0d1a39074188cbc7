"""`FusedMoe`: the routed experts of one layer, as Hugging Face and PEFT see them.

In: hidden states and the router's choice, as Hugging Face's experts modules take them, and LoRA factors. Out: the
weighted sum of the experts' outputs. Gradients go to the hidden states, the routing weights and the factors.
`ExpertsWeights` holds the weights, and a backend computes each call.
Refused: tensors of another shape than the layer's, an unknown form, a forward before every expert is loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.experts.backends.backend import ExpertsBackend, Offload, choose
from ktc.model.experts.backends.cpu_backend import Activations
from ktc.model.experts.kept.kept_experts import KeptLayer
from ktc.model.experts.layouts.stock_layout import stock_names
from ktc.model.experts.private_api import ConversionHook, LoadHooks
from ktc.model.experts.trained.frozen_weights import tell_of_frozen
from ktc.model.experts.trained.lora import ExpertsLora
from ktc.model.experts.weights import ExpertsWeights
from ktc.model.kernels.form import ExpertPart, ExpertsForm
from ktc.model.kernels.step_context import StepContext


class FusedMoe(LoadHooks, ConversionHook, nn.Module):
    """Routed experts; forward takes `(T, H), (T, K) int64, (T, K)` and returns `(T, H)`.

    PEFT needs the tensors of the stock module (`stock_names`: `gate_up_proj` or, without a gate, `up_proj`;
    `down_proj`; their biases) by name and in their stock shapes. They are not registered, so optimizers, `state_dict`
    and `.to()` do not see them. With a kernel they have no storage; `expert` returns the weights. Weights that train
    are registered parameters.

    `.to(device)` moves nothing. `.float()`, `.half()` and the like change the dtype of the reference; a kernel computes
    in the dtype it was built for (a warning, L429) and returns the dtype of its hidden states.
    K may differ from `top_k`. Copies share weights that are frozen.

    Args:
        weights: the layer's weights, with the kernel that reads them or the tensors of the PyTorch reference.
        activations: `keep` saves gate and up of every slot for backward, `recompute` computes them again.
        offload: the number of tokens from which a kernel's experts are streamed to a device, and that device.
    """

    def __init__(
        self, weights: ExpertsWeights, *, activations: Activations = "keep", offload: Offload | None = None
    ) -> None:
        super().__init__()
        self.num_experts, self.hidden, self.intermediate, self.top_k = weights.sizes
        self.activations: Activations = activations
        self.offload = offload
        self.guard: Callable[[], None] | None = None  # of the loader: reports changes since the model was loaded
        self.step_context = StepContext()  # replaced by that of the model
        self.kept: KeptLayer | None = None  # set by the loader
        self.weights = weights
        self._show()

    def _show(self) -> None:
        """Register the stock tensors as parameters where they train; `__getattr__` shows others."""
        if self.weights.training.trains:
            for name, tensor in self.weights.stock.items():
                self.register_parameter(name, tensor)
            self.weights.stock = cast("dict[Any, nn.Parameter]", self._parameters)

    def __getattr__(self, name: str) -> Any:
        """Return a stock tensor that is not a parameter of the module, or an attribute that PyTorch keeps elsewhere."""
        weights = self.__dict__.get("weights")
        if isinstance(weights, ExpertsWeights) and name in weights.stock and name not in self._parameters:
            return weights.stock[name]
        return super().__getattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, in place of a stock tensor too: kernels do not read it, and the guard warns."""
        if name in self.weights.stock:
            self._parameters[name] = param
        else:
            super().register_parameter(name, param)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the stock tensors by name. A parent module does not list them."""
        if not self.weights.training.trains:
            yield from ((f"{prefix}.{name}".lstrip("."), tensor) for name, tensor in self.weights.stock.items())
        yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def __getitem__(self, expert: object) -> NoReturn:
        """Refuse (L437) a single expert: a list of experts has become one module."""
        message = f"expert {expert} is not a module of its own: compiled experts are one module"
        hint = (
            "`experts.expert(number, part)` returns a copy of its weights; a rule that keeps the experts, the modules"
        )
        raise InputRefused(Diagnostic("L437", message, hint=hint))

    def __setitem__(self, expert: object, module: object) -> None:
        """Refuse (L437) another module for a single expert."""
        self[expert]

    def requires_grad_(self, requires_grad: bool = True) -> FusedMoe:
        """Set it for the weights where they train. Packed ones stay frozen, with a warning (L470)."""
        if requires_grad and not self.weights.training.trains:
            tell_of_frozen(1, self.num_parameters())
            return self
        return super().requires_grad_(requires_grad)

    def num_parameters(self) -> int:
        """Count weights and biases, as the stock module has them."""
        return sum(tensor.numel() for tensor in self.weights.stock.values())

    def converts(self, fn: Callable[[Tensor], Tensor]) -> bool:
        """Change the dtype of the weights as `fn` would. Those that train are then converted."""
        wanted = fn(torch.empty(1, dtype=self.weights.dtype)).dtype
        if wanted != self.weights.dtype:
            self._become(wanted)
        return not self.weights.training.trains

    def _become(self, dtype: torch.dtype) -> None:
        if self.weights.packed:
            message = f"the experts' kernel computes in {self.weights.packed.dtype} as before; only the rest becomes"
            kept = Diagnostic("L429", f"{message} {dtype}", severity="warning")
            warnings.warn(f"{kept.code}: {kept.message}", stacklevel=3)
            return
        self.weights.become(dtype)
        self._show()

    def before_load(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Refuse weights of experts (L436). A load that is not strict would silently drop them."""
        entry = next((name for name in state_dict if name.startswith(prefix)), None)
        if entry is not None and not self.weights.training.trains:
            message = f"`{entry}` cannot be loaded into a compiled model: the weights of its experts are fixed"
            hint = "leave the experts out of the state dict, or load the checkpoint: `ktc.load(OUT, weights=FOLDER)`"
            raise InputRefused(Diagnostic("L436", message, hint=hint))

    def after_load(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Count weights that train as loaded."""
        if all(f"{prefix}{name}" in state_dict for name in self.weights.stock):
            self.weights.loads.loaded_all()

    @property
    def form(self) -> ExpertsForm:
        """The activation, gate and biases of the experts, and how their stock tensors are stored."""
        return self.weights.form

    @property
    def is_transposed(self) -> bool:
        """Whether the stock weights are `(E, inputs, outputs)`: PEFT asks."""
        return self.form.transposed

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights, 0 without a kernel."""
        return self.weights.packed.nbytes if self.weights.packed else 0

    def load_expert(self, expert: int, part: ExpertPart, tensor: Tensor) -> None:
        """Store one part of one expert: gate and up are `(I, H)`, down is `(H, I)`, biases `(I,)` and `(H,)`.

        Any float dtype. Raises `ValueError` for another shape, or a part that experts of this form lack.
        """
        self.weights.load(expert, part, tensor)

    def expert(self, expert: int, part: ExpertPart) -> Tensor:
        """Return a copy of one part of one expert, in the dtype it is computed in."""
        return self.weights.expert(expert, part)

    def missing(self) -> tuple[tuple[int, ExpertPart], ...]:
        """Return the (expert, part) pairs that were never loaded, in order of expert."""
        return self.weights.missing()

    def restore(self, name: str) -> None:
        """Await a load of all weights into the same memory. See `ExpertsWeights.restore`."""
        self.weights.restore(name)

    def process(self) -> None:
        """Admit calls again. See `ExpertsWeights.process`."""
        self.weights.process()

    def backend(self, tokens: int, *, plain: bool = False) -> ExpertsBackend:
        """Return the backend of a call with this number of tokens; a `plain` one has neither gradients nor LoRA."""
        return choose(
            self.weights, tokens, self.step_context, activations=self.activations, offload=self.offload, plain=plain,
            kept=self.kept,
        )  # fmt: skip

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, lora: ExpertsLora | None = None
    ) -> Tensor:
        if torch.compiler.is_compiling():
            return self._compute(hidden_states, top_k_index, top_k_weights, lora)
        return self._noted(self._compute, hidden_states, top_k_index, top_k_weights, lora)

    def _noted(self, compute: Callable[..., Tensor], *inputs: object) -> Tensor:
        """Return the result of `compute`. Its errors get the name of the module."""
        try:
            return compute(*inputs)
        except (IndexError, ValueError, MemoryError) as error:
            error.add_note(f"in `{self.weights.fqn}`")
            raise

    def _compute(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, lora: ExpertsLora | None
    ) -> Tensor:
        lora = self._admitted(hidden_states, top_k_index, top_k_weights, lora)
        if hidden_states.is_meta:  # shapes alone, differentiable as the values would be
            return hidden_states * top_k_weights.sum(-1, keepdim=True).to(hidden_states.dtype)
        lora = lora.drawn()
        plain = not torch.is_grad_enabled() and not any(lora.products)
        backend = self.backend(hidden_states.shape[0], plain=plain)
        return backend.run(hidden_states, top_k_index, top_k_weights, lora)

    def _admitted(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, lora: ExpertsLora | None
    ) -> ExpertsLora:
        """Check a call, and return its factors. Raises for weights that are not loaded and inputs of other shapes."""
        lora = lora or ExpertsLora()
        self.weights.require_loaded()
        if self.guard is not None:
            self.guard()
        self._check(hidden_states, top_k_index, top_k_weights)
        self._check_lora(lora)
        return lora

    def _check(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> None:
        choices = (*x_TH.shape[:1], *index_TK.shape[-1:])
        expected = ((*x_TH.shape[:1], self.hidden), choices, choices)
        shapes = tuple(tuple(tensor.shape) for tensor in (x_TH, index_TK, weights_TK))
        if shapes != expected or index_TK.dim() != 2:
            raise ValueError(f"expected hidden states, indices and weights of shapes {expected}, found {shapes}")
        if index_TK.dtype != torch.int64:
            raise ValueError(f"`top_k_index` must be int64, found {index_TK.dtype}")
        for name, tensor in (("hidden states", x_TH), ("routing weights", weights_TK)):
            if not tensor.is_floating_point():
                raise ValueError(f"{name} must be floating-point numbers, found {tensor.dtype}")

    def _check_lora(self, lora: ExpertsLora) -> None:
        if lora.gate_up is not None:
            outputs = self.intermediate * (2 if self.form.gated else 1)
            lora.gate_up.check(stock_names(self.form)[0], self.num_experts, self.hidden, outputs)
        if lora.down is not None:
            lora.down.check("down_proj", self.num_experts, self.intermediate, self.hidden)

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, hidden={self.hidden}, intermediate={self.intermediate}, "
            f"top_k={self.top_k}, form={self.form}, {'packed' if self.weights.packed else 'reference'}"
        )
