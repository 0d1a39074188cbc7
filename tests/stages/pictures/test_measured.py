"""What `ktc prove` measured, in every picture of a model: errors at their blocks, and red where they are too large."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.etree import ElementTree

import pytest

from ktc.stages.pictures.dot import render_dot
from ktc.stages.pictures.dump import SCHEMA, BlockDump, ModelDump, NodeDump
from ktc.stages.pictures.html import render_html
from ktc.stages.pictures.measured import Measured, of_block, of_model
from ktc.stages.pictures.svg import render_svg
from ktc.stages.pictures.text import render_text

_NODES = (NodeDump("x", "input", "x", shape=("b", 8), dtype="bf16"), NodeDump("output", "output", "output", ("x",)))
BLOCKS = tuple(
    BlockDump(key, name, tuple(f"model.layers.{i}.{path}" for i in (1, 2)), (1, 2), _NODES)
    for key, name, path in (("mlp_1", "TinyMoe", "mlp"), ("self_attn_1", "TinyAttention", "self_attn"))
)
DUMP = ModelDump(SCHEMA, "rewritten", "tiny", "bfloat16", (), BLOCKS)
CLEAN = (
    Measured(1, "model.layers.1", 2e-3, 2e-3, ""),
    Measured(1, "model.layers.1.mlp", 3.1e-3, 3e-3, ""),
    Measured(2, "model.layers.2.mlp", 4.2e-3, 4e-3, ""),
)
FAILED = (*CLEAN, Measured(2, "model.layers.2.mlp.experts", 0.5, 4e-3, "error 5.0e-01 <is> wrong: experts 3, 5 of 16"))
WRITERS = (
    lambda measured: render_text(DUMP, measured=measured),
    lambda measured: render_svg(DUMP, measured=measured),
    lambda measured: render_dot(DUMP, measured=measured),
    lambda measured: render_html([DUMP], measured=measured),
)


def test_a_block_has_its_largest_error_and_a_model_its_layers() -> None:
    found = of_block(BLOCKS[0], CLEAN)
    assert found is not None
    assert found.lines == ("ktc prove: error 4.2e-03 in layer 2, stock 4.0e-03",)
    assert not found.red
    assert of_block(BLOCKS[1], CLEAN) is None
    whole = of_model(CLEAN)
    assert whole is not None
    assert whole.lines == ("ktc prove: 2 layers compared, no error above twice stock's own",)
    assert of_model(()) is None


def test_one_layer_shows_its_own_errors() -> None:
    found = of_block(BLOCKS[0], CLEAN, layer=1)
    assert found is not None
    assert found.lines == ("ktc prove: error 3.1e-03, stock 3.0e-03",)
    failed = of_block(BLOCKS[0], FAILED, layer=1)
    assert failed is not None
    assert not failed.red


def test_errors_that_are_not_finite_come_first() -> None:
    found = of_block(BLOCKS[0], (*CLEAN, Measured(1, "model.layers.1.mlp", None, 1e-3, "the result is not finite")))
    assert found is not None
    assert found.lines[0].startswith("ktc prove: error not finite in layer 1")


@pytest.mark.parametrize("write", WRITERS)
def test_every_format_shows_errors_and_is_the_same_without_any(write: Callable[[Sequence[Measured]], str]) -> None:
    assert "ktc prove" not in write(())
    assert "4.2e-03" in write(CLEAN)
    for text in (write(()), write(CLEAN)):
        assert "RED" not in text
        assert 'class="frame failed"' not in text
    assert "experts 3, 5 of 16" in write(FAILED)


def test_a_picture_marks_the_block_that_fails_and_no_other() -> None:
    picture = render_svg(DUMP, measured=FAILED)
    frames = [frame for frame in ElementTree.fromstring(picture).iter() if "frame" in str(frame.get("class"))]
    assert [frame.get("class") for frame in frames] == ["frame failed", "frame"]
    page = render_html([DUMP], measured=FAILED)
    assert page.count('<article class="block failed"') == 1
    assert "&lt;is&gt; wrong" in page
    assert "<is> wrong" not in page
