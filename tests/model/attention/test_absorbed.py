"""Absorbed latent attention is the stock attention: every family, cache, mask and adapter, in fp64 and in bf16."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding_models import CHUNKS, LENGTH, absorbed, decoded, difference, inputs, latent_modules, stock_model
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, StaticCache

from ktc.diagnostics import HostLacks, InputRefused
from ktc.model.attention import latent
from ktc.model.attention.absorbed import AbsorbedAttention, Absorption, absorb
from ktc.model.attention.joined_keys import check_joined_keys, expanded
from ktc.model.attention.latent import attend, latent_scores
from ktc.model.attention.latent_sizes import LatentSizes
from ktc.model.attention.split_decode import SplitDecode
from ktc.model.attention.up_projection import UpProjection
from ktc.model.compare.double import InDouble
from ktc.model.hf.latent_cache import EXPAND
from ktc.model.hf.patching import stock_class

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUICK = ("deepseek_v2", "deepseek_v3", "deepseek_v32")
FAMILIES = [
    *QUICK,
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "axk1", "axk2", "bailing_hybrid", "dots3_note_text", "glm4_moe_lite", "glm_moe_dsa", "hy_v4", "kimi_linear",
            "longcat_flash",
        )
    ),
]  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def stock(request: pytest.FixtureRequest) -> PreTrainedModel:
    return stock_model(request.param)


@pytest.fixture(scope="module")
def deepseek() -> PreTrainedModel:
    return stock_model("deepseek_v2")


@pytest.mark.parametrize("elide", [True, False], ids=["elided", "concatenated"])
def test_it_is_stock_attention_in_fp64_with_a_cache(stock: PreTrainedModel, elide: bool) -> None:
    with InDouble():
        assert difference(decoded(absorbed(stock, elide=elide)), decoded(stock)) <= 1e-12


def test_gradients_are_those_of_stock_attention_in_fp64(stock: PreTrainedModel) -> None:
    ids, mask = inputs(stock)
    found = list[dict[str, Tensor]]()
    for model in (stock, absorbed(stock)):
        with InDouble():
            model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    assert found[0].keys() == found[1].keys()
    largest = max(float(each.norm()) for each in found[0].values())
    for name, wanted in found[0].items():
        assert float((found[1][name] - wanted).norm()) <= 1e-12 * max(float(wanted.norm()), 1e-3 * largest), name


def attended(query: Tensor, latent: Tensor, k_rope: Tensor, up: UpProjection, *, scale: float, **options: Any) -> Any:
    return attend(latent_scores(query, latent, k_rope, up, scale=scale), latent, up, **options)


@pytest.mark.parametrize(("phase", "chunks"), [("never", ()), ("decode", CHUNKS[1:]), ("prefill", CHUNKS[:1])])
def test_a_phase_chooses_the_calls_that_are_absorbed(
    deepseek: PreTrainedModel, phase: Any, chunks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = absorbed(deepseek, absorb=phase), list[int]()

    def counted(scores: Tensor, *args: Any, **options: Any) -> Any:
        calls.append(scores.shape[2])
        return attend(scores, *args, **options)

    monkeypatch.setattr("ktc.model.attention.absorbed.attend", counted)
    with InDouble():
        assert difference(decoded(model), decoded(deepseek)) <= 1e-12
    layers = len(list(latent_modules(model)))
    assert calls == [chunk for chunk in chunks for _ in range(layers)]


@pytest.mark.parametrize("name", QUICK)
def test_a_kernel_puts_the_keys_of_prompts_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from ktc.model.attention import joined_kernels

    model = absorbed(stock_model(name, torch.float32), absorb="never").to(DEVICE)
    ids = inputs(model)[0].to(DEVICE)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    calls, join = list[int](), joined_kernels.joined
    monkeypatch.setattr(joined_kernels, "joined", lambda *given: calls.append(1) or join(*given))
    for module in latent_modules(model):
        module.decode = SplitDecode(DEVICE)
    model(input_ids=ids)
    assert not calls, "gradients go through stock code"
    with torch.no_grad():
        found = model(input_ids=ids).logits
    assert len(calls) == len(list(latent_modules(model)))
    assert difference(found, wanted) <= 1e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_joined_keys_are_compared_with_the_code_of_each_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from ktc.model.attention import joined_kernels

    module = next(latent_modules(absorbed(stock_model(name)))).to(DEVICE)
    check_joined_keys(module, torch.device(DEVICE))
    stock, join = stock_class(module), joined_kernels.joined
    with monkeypatch.context() as patched:
        patched.setattr(joined_kernels, "joined", lambda *given: join(*given).flip(-1))
        with pytest.raises(HostLacks, match=f"H248.*`{stock.__name__}`"):
            check_joined_keys(module, torch.device(DEVICE))
    expand = getattr(stock, EXPAND)
    with monkeypatch.context() as patched:  # code of another release of transformers
        patched.setattr(stock, EXPAND, lambda *given: (expand(*given)[0].neg(), expand(*given)[1]))
        with pytest.raises(HostLacks, match="H248"):
            check_joined_keys(module, torch.device(DEVICE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_prompt_is_projected_once_whatever_its_rotary_keys_are(
    deepseek: PreTrainedModel, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    module = next(latent_modules(absorbed(deepseek))).to(DEVICE)
    module.decode, calls = SplitDecode(DEVICE), list[int]()
    module.get_submodule(module.absorption.kv_b).register_forward_hook(lambda *_: calls.append(1))
    sizes: LatentSizes = module.absorption.sizes
    latent = torch.randn(2, 1, 5, sizes.latent, device=DEVICE, dtype=module.kv_b_proj.weight.dtype)
    k_rope = torch.randn(2, 1, 5, sizes.rope, device=DEVICE).to(dtype)
    with torch.no_grad():
        wanted = getattr(stock_class(module), EXPAND)(module, latent, k_rope)
        calls.clear()
        assert all(map(torch.equal, expanded(module, latent, k_rope), wanted))
        assert len(calls) == 1
        monkeypatch.setattr("ktc.model.attention.joined_keys.is_plain", lambda tensor: tensor.shape[1] == 1)
        assert all(map(torch.equal, expanded(module, latent, k_rope), wanted))
    assert len(calls) == 2, "tensors of the projection that the kernel does not take are not computed again"


@pytest.mark.parametrize(("heads", "nope", "rope", "value"), [(16, 128, 64, 128), (3, 24, 8, 16)])
def test_joined_keys_are_copies(heads: int, nope: int, rope: int, value: int) -> None:
    pytest.importorskip("triton")
    from ktc.model.attention.joined_kernels import joined

    expanded = torch.randn(2, 5, heads * (nope + value), device=DEVICE).bfloat16()
    k_rope = torch.randn(2, 5, 1, rope + 4, device=DEVICE).bfloat16()[..., :rope].transpose(1, 2)
    keys = expanded.view(2, 5, heads, -1)[..., :nope].transpose(1, 2)
    wanted = torch.cat([keys, k_rope.expand(-1, heads, -1, -1)], -1)
    assert torch.equal(joined(expanded, k_rope, heads, nope), wanted)


def test_a_static_cache_serves(deepseek: PreTrainedModel) -> None:
    found = [
        decoded(model, StaticCache(config=model.config, max_cache_len=LENGTH + 4))
        for model in (deepseek, absorbed(deepseek))
    ]
    assert difference(found[1], found[0]) <= 1e-6


def test_a_cache_is_reordered_and_cropped(deepseek: PreTrainedModel) -> None:
    found = list[Tensor]()
    for model in (deepseek, absorbed(deepseek)):
        cache = DynamicCache(config=model.config)
        decoded(model, cache)
        cache.reorder_cache(torch.tensor([2, 2, 0]))
        cache.crop(-6)
        with torch.no_grad():
            found.append(model(input_ids=inputs(model)[0][:, :4], past_key_values=cache, use_cache=True).logits)
    assert difference(found[1], found[0]) <= 1e-6


@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["greedy", "beams", "lookup"]
)
def test_generate_gives_the_tokens_of_the_stock_model(deepseek: PreTrainedModel, how: dict[str, int]) -> None:
    ids, mask = inputs(deepseek)
    rows = slice(0, 1) if "prompt_lookup_num_tokens" in how else slice(None)
    given = {"input_ids": ids[rows], "attention_mask": mask[rows], "max_new_tokens": 12, "do_sample": False, **how}
    wanted, found = (
        model.generate(**given, pad_token_id=0) for model in (deepseek, absorbed(deepseek, absorb="decode"))
    )
    assert torch.equal(found, wanted)


def test_in_bf16_it_is_as_near_to_fp64_as_stock_attention(deepseek: PreTrainedModel) -> None:
    with InDouble():
        exact = decoded(deepseek)
    half = copy.deepcopy(deepseek).bfloat16()
    stock, ours = (difference(decoded(model), exact) for model in (half, absorbed(half)))
    assert ours <= 1.5 * stock


def adapted(model: PreTrainedModel, **settings: Any) -> Any:
    """A model with LoRA on the up-projection, of equal random factors."""
    made: Any = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=12, target_modules=["kv_b_proj", "q_proj"], **settings)
    )
    draw = torch.Generator().manual_seed(5)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * 0.1
    return made.eval()


@pytest.mark.parametrize("state", ["factored", "merged", "disabled", "dora"])
def test_lora_on_the_up_projection_is_exact(
    deepseek: PreTrainedModel, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = list[Tensor]()
    caplog.set_level(logging.WARNING)
    for model in (copy.deepcopy(deepseek), absorbed(deepseek)):
        made = adapted(model, use_dora=state == "dora")
        if state == "merged":
            made.merge_adapter()
        with InDouble():
            if state == "disabled":
                with made.disable_adapter():
                    found.append(decoded(made))
            else:
                found.append(decoded(made))
    assert difference(found[1], found[0]) <= 1e-12
    told = [record.message for record in caplog.records if "not absorbed" in record.message]
    assert bool(told) == (state == "dora"), "what is not absorbed is told"


def test_gradients_of_lora_on_the_up_projection_are_exact(deepseek: PreTrainedModel) -> None:
    ids, mask = inputs(deepseek)
    found = list[dict[str, Tensor]]()
    for model in (copy.deepcopy(deepseek), absorbed(deepseek)):
        made = adapted(model)
        with InDouble():
            made(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        found.append({name: p.grad for name, p in made.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, wanted in found[0].items():
        assert difference(found[1][name], wanted) <= 1e-11, name


def test_eager_attention_returns_its_weights(deepseek: PreTrainedModel) -> None:
    ids, mask = inputs(deepseek)
    found = list[Tensor]()
    for model in (copy.deepcopy(deepseek), absorbed(deepseek)):
        model.set_attn_implementation("eager")
        found.append(model(input_ids=ids, attention_mask=mask, output_attentions=True).attentions[0])
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-6, rtol=1e-5)


def test_another_attention_implementation_is_refused(deepseek: PreTrainedModel) -> None:
    model = absorbed(deepseek, absorb="never")
    next(latent_modules(model)).stock_config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(InputRefused, match="L450"):
        decoded(model)


def test_the_break_even_is_where_both_cost_the_same() -> None:
    sizes = LatentSizes(heads=128, nope=128, rope=64, value=128, latent=512)
    assert [round(sizes.break_even(positions)) for positions in (128, 1024, 16384)] == [73, 146, 169]
    for positions in (128, 4096):
        new = sizes.break_even(positions)
        expand = positions * 512 * 128 * 256
        more = new * (positions * 128 * (1024 - 256) + 512 * 128 * 256)
        assert expand == pytest.approx(more)


def test_another_module_is_refused(deepseek: PreTrainedModel) -> None:
    sizes = LatentSizes(4, 16, 8, 16, 32)
    with pytest.raises(ValueError, match="caches keys and values, and no latents"):
        absorb(nn.Linear(2, 2), Absorption(sizes, "kv_b_proj", "always", True))
    module = copy.deepcopy(next(latent_modules(deepseek)))
    with pytest.raises(ValueError, match="instead of"):
        absorb(module, Absorption(replace(sizes, latent=48), "kv_b_proj", "always", True))
    assert not isinstance(module, AbsorbedAttention)


@pytest.mark.parametrize("sinks", [False, True])
def test_many_sequences_are_computed_as_each_alone(sinks: bool) -> None:
    B, H, T, L, n, r, c, v = 9, 3, 2, 7, 4, 2, 5, 4
    generator = torch.Generator().manual_seed(1)
    query, latent, k_rope, weight = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((B, H, T, n + r), (B, L, c), (B, L, r), (H, n + v, c))
    )
    mask = torch.rand(B, 1, T, L, generator=generator) < 0.5
    mask[2] = False  # tokens that see nothing
    options: dict[str, Any] = {"scale": 0.7, "sinks": torch.ones(H, dtype=torch.float64) if sinks else None}
    up = UpProjection(weight, n)
    together, _ = attended(query, latent, k_rope, up, mask=mask, **options)
    rows = [slice(each, each + 1) for each in range(B)]
    alone = torch.cat(
        [attended(query[row], latent[row], k_rope[row], up, mask=mask[row], **options)[0] for row in rows]
    )
    assert difference(together.detach(), alone.detach()) <= 1e-12
    assert not together[2].any()
    inputs = query, latent, k_rope, weight
    gradients = [torch.autograd.grad(out.square().sum(), inputs, retain_graph=True) for out in (together, alone)]
    assert all(difference(*pair) <= 1e-12 for pair in zip(*gradients, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_on_a_gpu_are_not_rounded_before_their_sum(dtype: torch.dtype) -> None:
    B, H, T, L, n, r, c, v = 3, 4, 1, 300, 128, 64, 512, 128
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, T, n + r), (B, L, c), (B, L, r), (H, n + v, c)
    query, latent, k_rope, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    query, weight = 3 * query, weight / 16
    with torch.no_grad():
        wide = (each.double() for each in (query, latent, k_rope))
        exact, _ = attended(*wide, UpProjection(weight.double(), n), scale=0.07)
        rounded, _ = attended(query, latent, k_rope, UpProjection(weight, n), scale=0.07)
        on_gpu = (each.cuda() for each in (query, latent, k_rope))
        found, _ = attended(*on_gpu, UpProjection(weight.cuda(), n), scale=0.07)
    assert difference(found.cpu(), exact) <= difference(rounded, exact)


def test_the_gradients_of_wide_scores_are_those_of_their_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 6, 5), (2, 9, 5), (2, 6, 3), (2, 9, 3)
    leaves = [torch.randn(*s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    q_latent, keys, q_rope, k_rope = leaves
    scores = 0.3 * (q_latent @ keys.transpose(1, 2) + q_rope @ k_rope.transpose(1, 2))
    grad = torch.randn(*scores.shape, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad(scores, leaves, grad)
    found = latent._WideScores.backward(SimpleNamespace(saved_tensors=leaves, scale=0.3), grad)
    assert found[4] is None
    assert all(difference(a.detach(), b) <= 1e-12 for a, b in zip(found[:4], wanted, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_scores_on_a_gpu_have_the_gradients_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3, 4, 8 + 4), (2, 9, 16), (2, 9, 4), (3, 8 + 8, 16)
    inputs = [torch.randn(*shape, generator=generator).bfloat16() for shape in shapes]
    found = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        leaves = [each.to(device, dtype).requires_grad_() for each in inputs]
        out, _ = attended(*leaves[:3], UpProjection(leaves[3], 8), scale=0.3)
        with torch.no_grad():
            same, _ = attended(*leaves[:3], UpProjection(leaves[3], 8), scale=0.3)
        assert torch.equal(out, same)
        found.append([out, *torch.autograd.grad(out.double().square().sum(), leaves)])
    assert all(difference(b.detach().cpu(), a.detach()) <= 0.02 for a, b in zip(*found, strict=True))
