"""Linear layers of one input, multiplied by one kernel: queries, keys and values of a decoding step.

In: a model whose decoding steps become CUDA graphs. Out: the same model. Linear layers of one module that are on a GPU
and have inputs of one width are `siblings`: plain ones in bf16, or ones in Q8_0 as stored. They learn which of them are
called with the same tensor as the first; from the next call on the first call computes the products of all of these,
which the other calls take. A call with another tensor, or with one that was changed, is computed by itself, as is one
whose weight or bias was changed since the first call. Writes through `.data` count as no change. Results are the same
to the bit, whether layers are computed together or not.
Plain layers without siblings and the products of routers are multiplied by the same kernel, which reads a weight faster
than PyTorch's. Calls of many rows, with gradients, or in another dtype are the layer's own. Copies of a model are not
joined.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ktc.model.experts.backends.tracing import never_traced
from ktc.model.experts.load_state import LoadState
from ktc.model.experts.private_api import version_of
from ktc.model.graph.typed import named_modules
from ktc.model.hf.foreign_errors import first_line
from ktc.model.hf.patching import Patch
from ktc.model.hf.router import FusedRouter
from ktc.model.kernels.triton_support import lacking
from ktc.model.linears.coded_weight import FEW_ROWS
from ktc.model.linears.gemv import is_plain, is_traced
from ktc.model.linears.plain import SameProduct, is_plain_linear
from ktc.model.linears.stored_linear import StoredLinear

log = logging.getLogger(__name__)

_COLUMNS, _SIZES = 520, (70, 33, 64)  # of the layers that are compared with PyTorch's product
_BOUND: Final = 0.01  # of the relative error of bf16 numbers
_LARGEST: Final = 1 << 27  # bytes of a plain weight without siblings: PyTorch reads larger ones as fast


_State = tuple[object, ...]  # changes with the values of tensors


@dataclass(slots=True)
class _Call:
    """The first call with an input, and the products that further calls with it take, with their layers' states."""

    first: int
    input: weakref.ref[Tensor]
    state: _State
    products: dict[int, tuple[Tensor, _State | None]]

    def is_of(self, x: Tensor) -> bool:
        """Return whether `x` is the input, with the values that it had."""
        return self.input() is x and _state_of(x) == self.state


class Siblings:
    """The layers of one module, by numbers. A copy has none."""

    def __init__(self, layers: Sequence[nn.Linear] = ()) -> None:
        self._layers = tuple(weakref.ref(layer) for layer in layers)
        self._followers: dict[int, tuple[int, ...]] = {}  # by the first layer
        self._last: _Call | None = None

    def __reduce__(self) -> tuple[type[Siblings], tuple[()]]:
        return Siblings, ()

    def serve(self, layer: nn.Linear) -> bool:
        """Return whether the layer is one of these, and not a copy."""
        return any(known() is layer for known in self._layers)

    def times(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Return the product of `x` (..., K) with a layer. A tensor of inference mode counts no changes."""
        number = next(number for number, known in enumerate(self._layers) if known() is layer)
        if x.is_inference():
            return self._products((number,), x)[0]
        last = self._last
        if last is not None and number != last.first and last.is_of(x):
            if number not in last.products:
                followers = self._followers.get(last.first, ())
                if number not in followers:
                    self._followers[last.first] = (*followers, number)
                return self._products((number,), x)[0]
            product, state = last.products.pop(number)
            return product if state == _weights_of(layer) else self._products((number,), x)[0]
        followers = self._next_followers(number, x)
        product, *others = self._products((number, *followers), x)
        states = [_weights_of(cast("nn.Linear", self._layers[follower]())) for follower in followers]
        products = dict(zip(followers, zip(others, states, strict=True), strict=True))
        self._last = _Call(number, weakref.ref(x), _state_of(x), products)
        return product

    def _next_followers(self, first: int, x: Tensor) -> tuple[int, ...]:
        """Return the followers of a first layer that still serve its input.

        Forget others, and those of the last call whose products were not taken.
        """
        if self._last is not None and self._last.products:
            taken = (one for one in self._followers[self._last.first] if one not in self._last.products)
            self._followers[self._last.first] = tuple(taken)
        followers = tuple(one for one in self._followers.get(first, ()) if _follows(self._layers[one](), x))
        self._followers[first] = followers
        return followers

    @never_traced
    def _products(self, numbers: Sequence[int], x: Tensor) -> list[Tensor]:
        """Return the products, each in one piece."""
        layers = [cast("nn.Linear", self._layers[number]()) for number in numbers]
        rows, products = x.detach().reshape(-1, x.shape[-1]).contiguous(), list[Tensor]()
        most = _most_joined()
        for begin in range(0, len(layers), most):
            some = layers[begin : begin + most]
            sizes = [layer.out_features for layer in some]
            products += cast("tuple[Tensor, ...]", rows_times(rows, some).split(sizes, 1))
        return [product.contiguous().view(*x.shape[:-1], product.shape[1]) for product in products]


class SiblingLinear(Patch, SameProduct):
    """The code of a linear layer that is multiplied together with others of its module."""

    siblings: Siblings

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        layer = cast("nn.Linear", self)
        if self.siblings.serve(layer) and _serves(layer, input):
            return self.siblings.times(layer, input)
        return cast("Tensor", cast("Any", super()).forward(input))


def join_siblings(model: nn.Module, device: str = "cuda") -> tuple[str, ...]:
    """Join the linear layers of each module on devices of this type, and return the names of those that are joined."""
    names = list[str]()
    for name, parent in named_modules(model):
        groups = dict[object, list[tuple[str, nn.Linear]]]()
        for child_name, child in parent.named_children():
            if isinstance(child, nn.Linear) and (kind := _kind(child, device)) is not None:
                groups.setdefault(kind, []).append((child_name, child))
        for group in groups.values():
            if len(group) > 1 or _is_faster_alone(group[0][1]):
                siblings = Siblings([layer for _, layer in group])
                for child_name, layer in group:
                    cast("Any", SiblingLinear.put_on(layer)).siblings = siblings
                    names.append(f"{name}.{child_name}" if name else child_name)
    return tuple(names)


def multiply_few_rows(model: nn.Module, device: str = "cuda") -> None:
    """Let routers on devices of this type multiply few rows by the kernel of plain weights."""
    for _, module in named_modules(model):
        if isinstance(module, FusedRouter) and not module.routing.layout.layer:
            weight: Tensor = getattr(module, module.routing.layout.weight)
            if weight.device.type == device and multiplies_plain(weight.device):
                module.routing = replace(module.routing, multiply=few_rows_or_all)


def few_rows_or_all(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return F.linear's result."""
    tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
    plain = all(is_plain(one) and one.dtype == torch.bfloat16 and one.is_contiguous() for one in tensors)
    trains = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    few = 0 < x.numel() <= FEW_ROWS * x.shape[-1] and x.dim() == 2
    if not few or not plain or trains or is_traced() or torch.is_autocast_enabled(x.device.type):
        return functional.linear(x, weight, bias)
    from ktc.model.linears import plain_row_kernels

    return plain_row_kernels.rows_times(x.detach(), [weight.detach()], [None if bias is None else bias.detach()])


def _is_faster_alone(layer: nn.Linear) -> bool:
    return not isinstance(layer, StoredLinear) and layer.weight.nbytes <= _LARGEST


def _kind(layer: nn.Linear, device: str) -> object:
    """Return what layers that are multiplied together share, None for those that are not."""
    if isinstance(layer, StoredLinear):
        is_served = layer.device.type == device and layer.format == "q8_0" and not lacking(layer.device)
        return ("q8_0", layer.in_features, layer.device) if is_served else None
    weight = layer.weight
    if weight.device.type != device or weight.dtype != torch.bfloat16 or not is_plain_linear(layer):
        return None
    return ("bf16", layer.in_features, weight.device) if multiplies_plain(weight.device) else None


def _serves(layer: nn.Linear, x: Tensor) -> bool:
    """Return whether a call is one of few rows in bf16, without gradients, of tensors where the layer is."""
    weight = layer.weight
    if x.dtype != torch.bfloat16 or x.device != weight.device or x.shape[-1] != layer.in_features:
        return False
    if not 0 < x.numel() <= FEW_ROWS * layer.in_features or not is_plain(x) or is_traced():
        return False
    if torch.is_autocast_enabled(x.device.type):
        return False
    trains = x.requires_grad or any(parameter.requires_grad for parameter in layer.parameters())
    in_bf16 = weight.dtype == torch.bfloat16 and is_plain(weight) and weight.is_contiguous()
    return (isinstance(layer, StoredLinear) or in_bf16) and not (torch.is_grad_enabled() and trains)


def _follows(layer: nn.Linear | None, x: Tensor) -> bool:
    """Return whether a layer can be multiplied before its own call, which raises what is wrong with it."""
    return layer is not None and _weights_of(layer) is not None and _serves(layer, x)


def _weights_of(layer: nn.Linear) -> _State | None:
    """Return what changes with the weight and the bias of a layer, None where a change cannot be seen."""
    bias, loads = cast("Tensor | None", layer.bias), 0
    weight: Tensor | None = layer.weight
    if isinstance(layer, StoredLinear):
        is_ready = layer.loads.state is LoadState.KERNEL_LAYOUT
        weight, loads = layer.packed if is_ready else None, layer.loads.generation
    if weight is None or weight.is_inference() or (bias is not None and bias.is_inference()):
        return None
    return loads, _state_of(weight), None if bias is None else _state_of(bias)


def _state_of(tensor: Tensor) -> _State:
    return tensor.data_ptr(), version_of(tensor)


def _most_joined() -> int:
    """Return how many layers one launch multiplies. This loads no kernel that needs Gluon."""
    from ktc.model.linears.plain_row_kernels import MOST

    return MOST


def rows_times(rows: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """Return the products of rows (S, K) with layers of one kind, side by side."""
    given = [cast("Tensor | None", layer.bias) for layer in layers]
    biases = [None if bias is None else bias.detach().to(rows.dtype) for bias in given]
    if isinstance(layers[0], StoredLinear):
        from ktc.model.linears import coded_row_kernels

        matrices = [cast("StoredLinear", layer).matrix for layer in layers]
        return coded_row_kernels.rows_times_each(rows, matrices, biases)
    from ktc.model.linears import plain_row_kernels

    return plain_row_kernels.rows_times(rows, [layer.weight.detach() for layer in layers], biases)


@functools.cache
def multiplies_plain(device: torch.device) -> bool:
    """Return whether the kernel of plain weights multiplies as PyTorch on a device. A log says once if it does not."""
    if lacking(device):
        return False
    from ktc.model.linears import plain_row_kernels

    generator = torch.Generator().manual_seed(0)
    x, *weights = (
        torch.randn(size, _COLUMNS, generator=generator).bfloat16().to(device) for size in (FEW_ROWS, *_SIZES)
    )
    biases = [torch.randn(size, generator=generator).bfloat16().to(device) for size in _SIZES]
    wanted = torch.cat([x.float() @ w.float().T + b.float() for w, b in zip(weights, biases, strict=True)], 1)
    try:
        computed = plain_row_kernels.rows_times(x, weights, biases).float()
    except Exception as error:  # noqa: BLE001 - Triton's compiler raises anything
        log.warning("linear layers of one input are multiplied one by one on %s: %s", device, first_line(error))
        return False
    error = float((computed - wanted).square().sum().sqrt() / wanted.square().sum().sqrt())
    if not error <= _BOUND:
        log.warning(
            "linear layers of one input are multiplied one by one on %s: a relative error of %.2g", device, error
        )
    return error <= _BOUND
