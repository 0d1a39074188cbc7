"""GGUF's block formats and fp16: what the bits mean, what kernels make of them, and what is refused."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from kernel_layers import CODE_ROWS, ISAS, Layer, built, error, experts_of, random_layer, run, spec_of
from lora_layers import adapt, assert_close, run_adapted
from refresh_cycle import assert_cycle
from torch import Tensor

from ktc.foundation import host
from ktc.foundation.formats import BLOCKS, Float8Scales, WeightFormat
from ktc.foundation.isa import INSTRUCTION_SETS, Isa
from ktc.model.experts.layouts.stock_layout import ExpertPart, canonical_parts
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.references.block_reference import dequantise_blocks, quantise_blocks, random_blocks
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.kernels.kernel_library import KernelLibrary
from ktc.model.kernels.packed_size import packed_bytes
from ktc.stages.codegen import toolchain

NAMES = tuple(name for name, row in BLOCKS.items() if row.coded)
QUANTISED = tuple(name for name in NAMES if BLOCKS[name].quantises)
# Of gate and up, and of down: the pair of most files, two that can be made of other weights, and every other format.
MADE: tuple[WeightFormat, WeightFormat] = ("q8_0", "q4_0")
OTHERS = tuple(name for name in BLOCKS if name not in ("q4_k", "q6_k", *MADE))
PAIRS = (("q4_k", "q6_k"), MADE, *zip((OTHERS[1:] + OTHERS[:1])[::2], OTHERS[::2], strict=True))
# Rows of these are 16-bit fixed point or fp32 when they are few; others multiply bf16, which keeps 8 bits of fp16.
WIDE_ROWS = ("avx2", "avx512")
# Hidden and intermediate in blocks, experts, experts per token, tokens, and how many experts get any.
SHAPES = {
    "no tokens": (1, 1, 4, 2, 0, 4),
    "one token": (1, 2, 8, 3, 1, 8),
    "three tokens": (2, 1, 3, 2, 3, 3),
    "five tokens of one expert": (1, 1, 1, 1, 5, 1),
    "seventeen tokens": (1, 1, 2, 2, 17, 2),
    "two experts get all": (2, 1, 6, 2, 33, 2),
}
FEW_WEIGHTS = 48  # routing weights at least, over all draws of a shape
LANES = {"scalar": "ktc::scalar::Lanes<ktc::bf16>"}


def spec_for(isa: Isa, pair: tuple[WeightFormat, WeightFormat]) -> FusedMoeSpec:
    return replace(spec_of(isa), format_gate_up=pair[0], format_down=pair[1])


QUICK = [spec_for(ISAS[0], PAIRS[0]), *(spec_for(isa, MADE) for isa in WIDE_ROWS[:1] if isa in ISAS[1:])]
SLOW = [spec for isa in ISAS for pair in PAIRS if (spec := spec_for(isa, pair)) not in QUICK]
SPECS = [*QUICK, *(pytest.param(spec, marks=pytest.mark.slow) for spec in SLOW)]
Library = Callable[[FusedMoeSpec], KernelLibrary]


@pytest.fixture(scope="module")
def library() -> Library:
    """The library of a spec: one for the quick ones, another for the others, each built when it is first asked for."""
    return lambda spec: built(tuple(QUICK if spec in QUICK else SLOW))


def layer_for(spec: FusedMoeSpec, shape: tuple[int, ...], seed: int = 1) -> Layer:
    hidden, inter, experts, top_k, tokens, used = shape
    sizes = {name: BLOCKS[name].weights for name in spec.formats}
    width = {name: size * (1 if size == 256 else -(-160 // size) | 1) for name, size in sizes.items()}  # odd numbers
    hidden, inter = hidden * width[spec.format_gate_up], inter * width[spec.format_down]
    return random_layer(hidden, inter, experts, top_k, tokens, seed=seed, experts_used=used)


def draws(tokens: int, top_k: int) -> range:
    """The seeds of layers whose errors are pooled: a norm over a few values that are rounded once is no average."""
    return range(1, 1 + max(1, FEW_WEIGHTS // max(1, tokens * top_k)))


def module_for(library: Library, spec: FusedMoeSpec, layer: Layer, **options: object) -> FusedMoe:
    """Experts of random blocks; the layer's weights become what a few rows are multiplied with."""
    sizes = (layer.num_experts, layer.hidden, layer.intermediate, layer.top_k)
    kernel = library(spec).kernel(spec.entry)
    module = experts_of(*sizes, layer.form, kernel=kernel, **options)  # type: ignore[arg-type]
    fill(module, spec, layer)
    return module


def fill(module: FusedMoe, spec: FusedMoeSpec, layer: Layer) -> None:
    generator = torch.Generator().manual_seed(3)
    for expert, part, values in matrices(layer):
        weight_format = spec.format_of(part)
        rows, columns = values.shape
        blocks = random_blocks(rows, columns, weight_format, columns**-0.5, generator)
        module.weights.load_blocks(expert, part, blocks)
        exact = dequantise_blocks(blocks, weight_format)
        rounded = weight_format == "fp16" and spec.isa not in WIDE_ROWS
        values.copy_(exact.bfloat16() if rounded else exact)


def matrices(layer: Layer) -> list[tuple[int, ExpertPart, Tensor]]:
    return [
        (expert, part, values)
        for name, tensor in layer.stock.items()
        for expert in range(layer.num_experts)
        for part, values in canonical_parts(layer.form, name, tensor[expert])
    ]


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, but that one NaN is as good as another."""
    both = found.isnan() & expected.isnan()
    return bool((both | (found == expected)).all())


def any_bytes(name: str, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Blocks (rows, bytes of a row) of random bytes, but for those that a row has once."""
    form = BLOCKS[name]
    blocks = torch.randint(
        256, (rows, columns // form.weights, form.block_bytes), dtype=torch.uint8, generator=generator
    )
    blocks[..., : form.shared] = blocks[:, :1, : form.shared]
    if isinstance(form.scales, Float8Scales):  # no NaN, which is refused when blocks are loaded
        blocks[blocks & 127 == 127] = 1
    return blocks.flatten(1)


# What the bits mean


@pytest.mark.parametrize("name", [name for name in NAMES if BLOCKS[name].gguf is not None])
def test_any_bytes_mean_what_gguf_says(name: str) -> None:
    size = BLOCKS[name].block_bytes
    blocks = torch.randint(256, (64, 6 * size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    with np.errstate(all="ignore"):  # infinite scales are among them
        expected = gguf.dequantize(blocks.numpy(), GGMLQuantizationType[name.upper()])
    assert same(dequantise_blocks(blocks, name), torch.from_numpy(expected))


@pytest.mark.parametrize("name", [name for name in QUANTISED if BLOCKS[name].gguf is not None])
def test_weights_become_the_blocks_that_gguf_makes(name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    normal = torch.randn(64, 128, generator=generator)
    for weights in (normal, normal.bfloat16().float(), torch.zeros(1, 32), torch.randint(-3, 4, (64, 128)).float()):
        expected = gguf.quantize(weights.numpy(), GGMLQuantizationType[name.upper()])
        assert torch.equal(quantise_blocks(weights, name), torch.from_numpy(expected))


def compiled(name: str, isa: Isa, folder: Path, formats: Iterable[str], *options: str) -> Path:
    """The program beside this file, built as kernels for `isa` are, with the panels of `formats`."""
    panels = [panel for each in formats if (panel := BLOCKS[each].panel)]
    headers = [flag for panel in panels for flag in ("-include", f"ktc/weight_format/{panel.header}.hpp")]
    types = ",".join(f"ktc::weight_format::{panel.type}" for panel in panels)
    source, program = Path(__file__).with_name(f"{name}.cpp"), folder / name
    tools = toolchain.find(host.detect())
    includes = [f"-I{path}" for path in tools.include]
    command = [tools.compiler.path, *tools.flags(isa, source.name), f"-DKTC_UNIT={name}", *includes, *options, *headers]
    subprocess.run([*command, f"-DKTC_PANELS={types}", str(source), "-o", str(program)], check=True)
    return program


def test_a_million_weights_become_the_same_blocks_where_multiply_and_add_could_be_one(tmp_path: Path) -> None:
    """Ties are common among weights rounded to bf16: a code would be another one if they were added unrounded."""
    program = compiled("quantise_blocks", ISAS[0], tmp_path, QUANTISED)
    weights = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(12)).bfloat16().float()
    weights[0] *= 1e-38  # blocks whose scale is no normal number
    for name in QUANTISED:
        done = subprocess.run([program, name], input=weights.numpy().tobytes(), capture_output=True, check=True)
        found = torch.frombuffer(bytearray(done.stdout), dtype=torch.uint8)
        assert torch.equal(found, quantise_blocks(weights, name).flatten()), name


@pytest.mark.parametrize("isa", [ISAS[0], *(pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS[1:])])
def test_every_instruction_set_decodes_them_to_the_bit_in_fp32(isa: Isa, tmp_path: Path) -> None:
    lanes = LANES.get(isa, f"ktc::{isa}::Isa::Lanes")
    program = compiled("decode_blocks", isa, tmp_path, BLOCKS, "-include", f"ktc/isa/{isa}.hpp", f"-DKTC_LANES={lanes}")
    generator = torch.Generator().manual_seed(4)
    for name, form in BLOCKS.items():
        blocks = any_bytes(name, 32, 512, generator)
        type_name = form.stored or name
        done = subprocess.run([program, type_name], input=blocks.numpy().tobytes(), capture_output=True, check=True)
        found = torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).view(32, 512)
        assert same(found, dequantise_blocks(blocks, name)), name


# What kernels make of them


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.entry)
def test_blocks_are_replaced_where_they_are(library: Library, spec: FusedMoeSpec) -> None:
    layer = layer_for(spec, SHAPES["three tokens"])
    module = module_for(library, spec, layer)
    packed = module.weights.packed
    assert packed is not None
    assert_cycle(module, lambda: fill(module, spec, layer), lambda: run(module, layer)[0], packed.packed.data_ptr)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.entry)
def test_any_bytes_are_kept_as_they_are(library: Library, spec: FusedMoeSpec) -> None:
    layer = layer_for(spec, (2, 1, 2, 1, 1, 2))
    module = module_for(library, spec, layer)
    generator = torch.Generator().manual_seed(5)
    for expert, part, values in matrices(layer):
        blocks = any_bytes(spec.format_of(part), *values.shape, generator)
        module.weights.load_blocks(expert, part, blocks)
        assert same(module.expert(expert, part), dequantise_blocks(blocks, spec.format_of(part)).bfloat16())
    sizes = {"hidden": layer.hidden, "intermediate": layer.intermediate, "num_experts": 2, "top_k": 1}
    assert module.packed_bytes == packed_bytes(replace(spec, **sizes))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.entry)
def test_output_and_gradients_are_those_of_the_weights(
    library: Library, spec: FusedMoeSpec, shape: tuple[int, ...]
) -> None:
    _, _, _, top_k, tokens, _ = shape
    each = [compared(library, spec, layer_for(spec, shape, seed)) for seed in draws(tokens, top_k)]
    if not tokens:
        return
    out, out_by, d_x, d_x_by, d_weights, d_weights_by, products = (
        torch.cat(values) for values in zip(*each, strict=True)
    )
    rows = most_rows(layer_for(spec, shape))
    of_codes = any(by_codes(spec, name, rows) for name in spec.formats)
    assert error(out, out_by) <= 3e-3
    # What is kept of a forward on codes goes into a backward on their rounding: neither reference is all of it.
    assert error(d_x, d_x_by) <= (5e-3 if of_codes else 4e-3)
    scale = max(d_weights_by.norm(), products.norm())  # a few may cancel to their own rounding
    assert (d_weights - d_weights_by).norm() <= 5e-3 * scale


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.entry)
def test_tokens_of_an_expert_are_multiplied_with_the_codes(library: Library, spec: FusedMoeSpec) -> None:
    most = 50
    layer = layer_for(spec, (3, 2, 1, 1, most, 1))
    module = module_for(library, spec, layer)
    exact, _, _ = layer.expected()
    round_what_is_decoded(module, spec, layer, most)
    of_many, _, _ = layer.expected()
    x, weights = layer.x.bfloat16(), layer.weights.float()
    alone = torch.cat([module(x[row : row + 1], layer.index[:1], weights[row : row + 1]) for row in range(most)])
    for rows in (*range(1, 10), 16, 17, 18, 29, most):
        out = module(x[:rows], layer.index[:rows], weights[:rows])
        few = rows <= CODE_ROWS.get(spec.isa, 0)
        assert error(out, (exact if few else of_many)[:rows]) <= 3e-3
        if spec.isa in WIDE_ROWS and all(by_codes(spec, name, rows) for name in spec.formats):
            assert torch.equal(out, alone[:rows]), rows
    both = module_for(library, spec, layer_for(spec, (3, 2, 1, 1, most, 1)), threads=2)
    for rows in (7, 33):
        assert torch.equal(
            both(x[:rows], layer.index[:rows], weights[:rows]), module(x[:rows], layer.index[:rows], weights[:rows])
        )


def most_rows(layer: Layer) -> int:
    """Rows of the expert that has most."""
    return int(layer.index.flatten().bincount().max())


def by_codes(spec: FusedMoeSpec, weight_format: WeightFormat, rows: int) -> bool:
    """Whether an expert of `rows` rows is multiplied with the stored values, and not with their rounding to bf16."""
    return rows <= CODE_ROWS.get(spec.isa, 0) or (INSTRUCTION_SETS[spec.isa].words and BLOCKS[weight_format].coded)


def round_what_is_decoded(module: FusedMoe, spec: FusedMoeSpec, layer: Layer, rows: int) -> None:
    for expert, part, values in matrices(layer):
        if not by_codes(spec, spec.format_of(part), rows):
            values.copy_(module.expert(expert, part))


def compared(library: Library, spec: FusedMoeSpec, layer: Layer) -> tuple[Tensor, ...]:
    """Output and the gradients of hidden states and routing weights, each flat and beside its reference; and the size
    of the products that a routing weight's gradient adds up."""
    module = module_for(library, spec, layer)
    out, d_x, d_weights = run(module, layer)
    assert out.shape == d_x.shape == layer.x.shape
    if not layer.x.shape[0]:
        return ()
    round_what_is_decoded(module, spec, layer, most_rows(layer))
    expected_out, _, _ = layer.expected()
    for expert, name, values in matrices(layer):
        if name == "down":  # backward multiplies the rounded weights; gate and up are kept of forward
            values.copy_(module.expert(expert, name))
    _, _, expected_d_weights = layer.expected()
    for expert, name, values in matrices(layer):
        values.copy_(module.expert(expert, name))
    rounded, expected_d_x, _ = layer.expected()
    pairs = (out, expected_out), (d_x, expected_d_x)
    of_weights = d_weights, expected_d_weights
    products = layer.grad.norm() * rounded.norm() / layer.hidden**0.5
    return (*(value.flatten().double() for pair in (*pairs, of_weights) for value in pair), products[None])


@pytest.mark.parametrize("tokens", [4, 60])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.entry)
def test_lora_is_trained_on_them(library: Library, spec: FusedMoeSpec, tokens: int) -> None:
    each = [adapted_and_expected(library, spec, tokens, seed) for seed in draws(tokens, 2)]
    found, expected = (
        [torch.cat(values) for values in zip(*results, strict=True)] for results in zip(*each, strict=True)
    )
    of_codes = any(by_codes(spec, name, tokens) for name in spec.formats)
    assert_close(tuple(found), tuple(expected), 1.25 if of_codes else 1)


def adapted_and_expected(
    library: Library, spec: FusedMoeSpec, tokens: int, seed: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Output and gradients of a layer with LoRA, and what they should be."""
    layer = layer_for(spec, (1, 1, 2, 2, tokens, 2), seed)
    module = module_for(library, spec, layer)
    adapted = adapt(layer, 8, dropout=seed % 2 * 0.5)
    found = run_adapted(module, adapted)
    round_what_is_decoded(module, spec, layer, tokens)
    out = adapted.reference()[0]
    for expert, part, values in matrices(layer):
        values.copy_(module.expert(expert, part))
    _, *gradients = adapted.reference()
    return found, (out, *gradients)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.entry)
def test_an_infinity_stays_one_however_many_tokens_there_are(library: Library, spec: FusedMoeSpec) -> None:
    layer = layer_for(spec, (1, 1, 1, 1, 24, 1))
    module = module_for(library, spec, layer)
    x = layer.x.bfloat16()
    x[0, 3] = torch.inf
    weights = layer.weights.float()
    alone = module(x[:1], layer.index[:1], weights[:1])
    among = module(x, layer.index, weights)
    assert torch.equal(alone.isnan()[0], among.isnan()[0])
    assert torch.equal(alone.isinf()[0], among.isinf()[0])
    assert torch.equal(among[1:], module(layer.x.bfloat16(), layer.index, weights)[1:])


@pytest.mark.slow
def test_weights_of_other_formats_are_quantised_as_the_reference_does(library: Library) -> None:
    spec = spec_for(ISAS[0], MADE)
    layer = layer_for(spec, (3, 2, 2, 1, 1, 2))
    module = module_for(library, spec, layer)
    assert module.weights.takes_blocks("gate", "q8_0")
    assert module.weights.takes_blocks("down", "q4_0")
    assert not module.weights.takes_blocks("down", "q8_0")
    for expert, part, values in matrices(layer):
        weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(6))
        module.load_expert(expert, part, weights)
        blocks = quantise_blocks(weights, spec.format_of(part))
        assert torch.equal(module.expert(expert, part), dequantise_blocks(blocks, spec.format_of(part)).bfloat16())
    with pytest.raises(ValueError, match="not finite"):
        module.load_expert(0, "up", torch.full((layer.intermediate, layer.hidden), torch.nan))


# What is refused


def test_what_is_no_such_block_is_refused(library: Library) -> None:
    spec = QUICK[0]
    layer = layer_for(spec, (1, 1, 1, 1, 1, 1))
    module = module_for(library, spec, layer)
    blocks = torch.zeros(256, 144, dtype=torch.uint8)
    assert module.weights.takes_blocks("up", "q4_k")
    with pytest.raises(ValueError, match="q4_k weights are taken only as a file stores them"):
        module.load_expert(0, "up", torch.zeros(256, 256))
    with pytest.raises(ValueError, match=r"`up` is stored in blocks of q4_k; found torch\.int8"):
        module.weights.load_blocks(0, "up", blocks.view(torch.int8))
    with pytest.raises(ValueError, match="expected a matrix of 256 x 256, found 255 x 256"):
        module.weights.load_blocks(0, "up", blocks[1:])
    with pytest.raises(ValueError, match="expected a matrix of 256 x 256, found 256 x -1"):
        module.weights.load_blocks(0, "up", blocks[:, 1:])
    with pytest.raises(ValueError, match="not stored in codes"):
        module.weights.load_codes(0, "up", torch.zeros(256, 256, dtype=torch.int8), torch.ones(256, 1))


@pytest.mark.parametrize(("hidden", "inter", "what"), [
    (224, 256, "q4_k weights in blocks of 256: hidden = 224"), (256, 96, "q6_k .* of 256: intermediate = 96"),
])  # fmt: skip
def test_rows_that_are_no_whole_blocks_are_refused_by_name(
    library: Library, hidden: int, inter: int, what: str
) -> None:
    kernel = library(QUICK[0]).kernel(QUICK[0].entry)
    with pytest.raises(ValueError, match=what):
        experts_of(2, hidden, inter, 1, kernel=kernel)
