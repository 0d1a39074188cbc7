"""Linear layers of one input are multiplied together, and give what each of them gives alone."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from ktc.model.attention.up_projection import UpProjection, up_projection
from ktc.model.decode_steps import gpu_linears
from ktc.model.decode_steps.gpu_linears import SiblingLinear, join_siblings
from ktc.model.linears import plain_row_kernels
from ktc.model.linears.absent_weight import LinearWithoutWeight
from ktc.model.linears.plain import is_plain_linear
from ktc.model.loading import refresh

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
SIZE = 48


class Attention(nn.Module):
    def __init__(self, sizes: tuple[int, ...] = (40, 20, 24)) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(SIZE, size) for size in sizes)
        self.o_proj = nn.Linear(sizes[0], SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(q) + (k.sum() + v.sum())


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many layers the calls of the kernel multiply."""
    counts, stock = list[int](), gpu_linears.rows_times

    def counted(rows: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
        counts.append(len(layers))
        return stock(rows, layers)

    monkeypatch.setattr(gpu_linears, "rows_times", counted)
    return counts


def attention(**options: object) -> Attention:
    torch.manual_seed(0)
    made = Attention(**options).to(DEVICE, torch.bfloat16).requires_grad_(False)  # pyright: ignore[reportArgumentType]
    return made.eval()


def _seen(module: nn.Module, given: object, result: object) -> None:
    """Do nothing: a hook."""


def close(one: Tensor, other: Tensor) -> bool:
    difference = one.float() - other.float()
    return float(difference.square().sum()) <= 1e-4 * float(other.float().square().sum())


def test_layers_of_one_input_are_one_product_from_the_second_call_on(products: list[int]) -> None:
    stock, model = attention(), attention()
    assert join_siblings(model, DEVICE.type) == ("q_proj", "k_proj", "v_proj", "o_proj")
    x = torch.randn(1, 2, SIZE, device=DEVICE).bfloat16()
    layers = model.q_proj, model.k_proj, model.v_proj
    inputs = x, x.clone(), x.clone()
    results = [[layer(given) for layer in layers] for given in inputs]
    assert products == [1, 1, 1, 3, 3]
    for alone, together, layer in zip(results[0], results[1], (stock.q_proj, stock.k_proj, stock.v_proj), strict=True):
        assert torch.equal(alone, together) and close(alone, layer(x)) and alone.shape == (1, 2, layer.out_features)
    assert close(model(x), stock(x))


def test_an_input_that_was_changed_or_is_another_tensor_is_multiplied_by_itself(products: list[int]) -> None:
    model = attention()
    join_siblings(model, DEVICE.type)
    for _ in range(2):
        model(torch.randn(1, SIZE, device=DEVICE).bfloat16())
    x = torch.randn(1, SIZE, device=DEVICE).bfloat16()
    model.q_proj(x)
    products.clear()
    x.add_(1)
    changed = model.k_proj(x)
    assert close(changed, nn.Linear.forward(model.k_proj, x)) and products == [1]
    assert torch.equal(model.v_proj(x.clone()), model.v_proj(x))


def test_a_product_is_taken_once_and_a_repeated_call_computes_again(products: list[int]) -> None:
    model = attention()
    join_siblings(model, DEVICE.type)
    model(torch.randn(1, SIZE, device=DEVICE).bfloat16())
    x = torch.randn(1, SIZE, device=DEVICE).bfloat16()
    first = model.q_proj(x), model.k_proj(x), model.k_proj(x)
    assert products[4:] == [3, 1]
    assert torch.equal(first[1], first[2]) and first[1].data_ptr() != first[2].data_ptr()


def test_more_layers_than_a_kernel_takes_are_several_products(products: list[int]) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(SIZE, size, bias=size != 9).to(DEVICE, torch.bfloat16) for size in (9, 17, 33, 40, 8)]
    model = nn.Sequential(*layers).requires_grad_(False)
    assert len(join_siblings(model, DEVICE.type)) == 5
    x = torch.randn(3, SIZE, device=DEVICE).bfloat16()
    for given in (x, x.clone()):
        results = [layer(given) for layer in layers]
        assert all(close(one, nn.Linear.forward(layer, x)) for one, layer in zip(results, layers, strict=True))
    assert products[-2:] == [3, 2]


def test_other_calls_are_the_stock_layers(products: list[int]) -> None:
    model, stock = attention(), attention()
    join_siblings(model, DEVICE.type)
    many = torch.randn(9, SIZE, device=DEVICE).bfloat16()
    assert torch.equal(model.q_proj(many), stock.q_proj(many))
    trained = torch.randn(1, SIZE, device=DEVICE).bfloat16().requires_grad_()
    model.q_proj(trained).float().sum().backward()
    assert trained.grad is not None
    with torch.inference_mode():
        x = torch.randn(1, SIZE, device=DEVICE).bfloat16()
        assert products == []
        for _ in range(2):
            model(x)
    assert products == [1] * 8


def test_layers_that_are_not_plain_or_alone_keep_their_code() -> None:
    model = attention()
    model.k_proj.register_forward_hook(_seen)
    model.v_proj = nn.Linear(SIZE, 8).to(DEVICE, torch.bfloat16)
    assert join_siblings(model, DEVICE.type) == ("q_proj", "v_proj", "o_proj")
    assert join_siblings(attention().float(), DEVICE.type) == ()
    assert join_siblings(attention(), "meta") == ()


def test_copies_compute_by_their_own_code(products: list[int]) -> None:
    model = attention()
    join_siblings(model, DEVICE.type)
    x = torch.randn(1, SIZE, device=DEVICE).bfloat16()
    model(x)
    products.clear()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other.q_proj, SiblingLinear) and close(other(x), model(x.clone()))
    assert products == [3, 1, 3, 1]


def test_a_device_whose_kernel_is_wrong_keeps_the_stock_layers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpu_linears, "multiplies_plain", gpu_linears.multiplies_plain.__wrapped__)
    stock = plain_row_kernels.rows_times

    def wrong(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
        return stock(x, weights, biases) * 1.1

    monkeypatch.setattr(plain_row_kernels, "rows_times", wrong)
    with caplog.at_level("WARNING"):
        assert join_siblings(attention(), DEVICE.type) == ()
    assert "one by one" in caplog.text


def test_routers_multiply_few_rows_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, bias = (torch.randn(*size, device=DEVICE).bfloat16() for size in ((8, SIZE), (8,)))
    rows, kernel = list[int](), plain_row_kernels.rows_times

    def counted(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
        rows.append(len(x))
        return kernel(x, weights, biases)

    monkeypatch.setattr(plain_row_kernels, "rows_times", counted)
    for size in (1, 4, 5):
        x = torch.randn(size, SIZE, device=DEVICE).bfloat16()
        for given in (bias, None):
            wanted = nn.functional.linear(x, weight, given)
            assert close(gpu_linears.few_rows_or_all(x, weight, given), wanted)
    assert rows == [1, 1, 4, 4]
    trained = torch.randn(1, SIZE, device=DEVICE).bfloat16().requires_grad_()
    gpu_linears.few_rows_or_all(trained, weight, bias).sum().backward()
    assert trained.grad is not None and len(rows) == 4


def test_other_code_sees_plain_layers_where_they_were_plain() -> None:
    model = attention()
    join_siblings(model, DEVICE.type)
    assert isinstance(model.q_proj, SiblingLinear) and is_plain_linear(model.q_proj)
    projection = nn.Linear(SIZE, 2 * 24, bias=False).to(DEVICE, torch.bfloat16)
    stock = up_projection(projection, 2, 8)
    join_siblings(nn.Sequential(projection), DEVICE.type)
    assert isinstance(projection, SiblingLinear) and isinstance(stock, UpProjection)
    assert isinstance(up_projection(projection, 2, 8), UpProjection)
    model.q_proj.register_forward_hook(_seen)
    assert not is_plain_linear(model.q_proj)


def test_a_joined_layer_fits_one_that_is_not_when_weights_are_replaced() -> None:
    made, target = LinearWithoutWeight(SIZE, 8), LinearWithoutWeight(SIZE, 8)
    SiblingLinear.put_on(target)
    misfit = refresh._misfit  # pyright: ignore[reportPrivateUsage]
    assert misfit(made, target) == ""
    assert "another kind" in misfit(made, nn.Linear(SIZE, 8))


def learnt() -> Attention:
    model = attention()
    join_siblings(model, DEVICE.type)
    model(torch.randn(1, SIZE, device=DEVICE).bfloat16())
    return model


def row(*rows: int) -> Tensor:
    return torch.randn(*rows or (1,), SIZE, device=DEVICE).bfloat16()


def replaced(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight * 2, requires_grad=False)


def multiplied(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(2)


def biased(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.bias.add_(1)


def moved(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data * 2


@pytest.mark.parametrize("change", [replaced, multiplied, biased, moved])
def test_a_weight_that_was_changed_behind_the_first_call_is_multiplied_as_it_is(
    change: Callable[[nn.Linear], None],
) -> None:
    model, x = learnt(), row()
    model.q_proj(x)
    change(model.k_proj)
    assert close(model.k_proj(x), nn.Linear.forward(model.k_proj, x))


def test_an_input_with_other_memory_is_multiplied_by_itself() -> None:
    model, x = learnt(), row()
    model.q_proj(x)
    x.data = row()
    assert close(model.k_proj(x), nn.Linear.forward(model.k_proj, x))


def in_columns(model: Attention) -> None:
    model.k_proj.weight = nn.Parameter(model.k_proj.weight.t().contiguous().t(), requires_grad=False)


def another(model: Attention) -> None:
    model.k_proj = nn.Linear(SIZE, 20).to(DEVICE, torch.bfloat16).requires_grad_(False)
    gc.collect()


def on_meta(model: Attention) -> None:
    model.k_proj.to("meta")


def in_fp32(model: Attention) -> None:
    model.k_proj.float()


def trained(model: Attention) -> None:
    model.k_proj.requires_grad_(True)


@pytest.mark.parametrize("change", [in_columns, another, on_meta, in_fp32, trained])
def test_a_layer_that_cannot_be_joined_any_more_leaves_its_siblings(
    products: list[int], change: Callable[[Attention], None]
) -> None:
    model, x = learnt(), row()
    change(model)
    products.clear()
    assert close(model.q_proj(x), nn.Linear.forward(model.q_proj, x))
    assert close(model.v_proj(x), nn.Linear.forward(model.v_proj, x)) and products == [2]
    if change is trained:
        assert model.k_proj(x).requires_grad


def test_a_layer_in_another_dtype_raises_the_error_of_stock_code() -> None:
    model = learnt()
    model.q_proj.float()
    with pytest.raises(RuntimeError, match="same dtype"):
        model.q_proj(row())


def test_a_layer_whose_product_was_not_taken_is_multiplied_alone_again(products: list[int]) -> None:
    model = learnt()
    products.clear()
    inputs = row(), row(), row()
    for x in inputs:
        model.q_proj(x)
        model.v_proj(x)
    assert products == [3, 2, 2]
    model(inputs[-1])
    model(row())
    assert products[3:] == [2, 1, 1, 3, 1]


def test_joined_products_of_several_rows_are_in_one_piece() -> None:
    model, x = learnt(), row(2, 1)
    assert all(layer(x).is_contiguous() for layer in (model.q_proj, model.k_proj, model.v_proj))
