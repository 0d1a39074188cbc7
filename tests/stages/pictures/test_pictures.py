"""Text, SVG, DOT, HTML and differences of dumps: what they show, and that no name of a model gets out of its place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from browser import complaints, opened_browser, overflow
from work import calls

from ktc.cli.graph import Request
from ktc.cli.graph import render as render_graph
from ktc.diagnostics import HostLacks
from ktc.foundation.module_paths import ranges
from ktc.stages.pictures.diff import diff
from ktc.stages.pictures.dot import render_dot
from ktc.stages.pictures.dump import SCHEMA, BlockDump, MatchDump, ModelDump, ModuleDump, NodeDump
from ktc.stages.pictures.html import render_html
from ktc.stages.pictures.labels import collapse, printable, quantity
from ktc.stages.pictures.layout import place
from ktc.stages.pictures.module_tree import module_tree
from ktc.stages.pictures.overview import overview
from ktc.stages.pictures.svg import render_svg
from ktc.stages.pictures.text import render_text

HOSTILE = '</script><script>alert(1)</script>"\'<!-- ]]> &amp; \\" {{ 7*7 }} \x1b[31m\x00\u202e\ud800' + "long" * 2000


def moe_block(rewritten: bool = False) -> BlockDump:
    made = {"rule": "experts", "span": "moe-lora.ktr:12:3", "device": "cpu"} if rewritten else {}
    linear = {"rule": "adapters", "span": "moe-lora.ktr:8:3", "device": "cuda:0"} if rewritten else {}
    nodes = (
        NodeDump("hidden", "input", "hidden", shape=("b", "s", 64), dtype="bf16"),
        NodeDump("position_ids", "input", "position_ids", shape=(1, "s"), dtype="i64"),
        NodeDump("gate_weight", "weight", "gate.weight", shape=(16, 64), dtype="bf16", fqn="gate.weight"),
        NodeDump("down", "weight", "experts.down_proj", shape=(16, 64, 48), dtype="bf16", fqn="experts.down_proj"),
        NodeDump("up_weight", "weight", "shared.up.weight", shape=(48, 64), dtype="bf16", fqn="shared.up.weight"),
        NodeDump("size", "sym_size", "aten.sym_size.int", ("hidden",), (("dim", "0"),)),
        NodeDump("flat", "reshape", "aten.view.default", ("hidden", "size"), (("size", "[t, 64]"),), ("t", 64), "bf16"),
        NodeDump("wide", "cast", "aten._to_copy.default", ("gate_weight",), (("dtype", "float32"),), (16, 64), "f32"),
        NodeDump("scores", "linear", "aten.linear.default", ("flat", "wide"), shape=("t", 16), dtype="f32"),
        NodeDump("best", "topk", "aten.topk.default", ("scores",), (("k", "4"), ("sorted", "False"))),
        NodeDump("weights", "getitem", "_operator.getitem", ("best",), (("1", "0"),), ("t", 4), "f32"),
        NodeDump("indices", "getitem", "_operator.getitem", ("best",), (("1", "1"),), ("t", 4), "i64"),
        NodeDump("routed", "experts", "experts", ("flat", "indices", "weights", "down"), (), ("t", 64), "bf16", **made),
        NodeDump("up", "linear", "aten.linear.default", ("flat", "up_weight"), (), ("t", 48), "bf16", **linear),
        NodeDump("sum", "add", "aten.add.Tensor", ("routed", "up"), shape=("t", 64), dtype="bf16"),
        NodeDump("output", "output", "output", ("sum",)),
    )  # fmt: skip
    sites = tuple(f"model.layers.{i}.mlp" for i in (1, 2, 3))
    return BlockDump("mlp_1", "TinyMoe", sites, (1, 2, 3), nodes, ("the router computes in f32",))


def modules(rewritten: bool = False) -> tuple[ModuleDump, ...]:
    rows = [ModuleDump("", "TinyForCausalLM", 0, 0), ModuleDump("model.embed", "Embedding", 64_000, 128_000, "cuda:0")]
    for i in range(4):
        layer = f"model.layers.{i}"
        rows.append(ModuleDump(layer, "TinyLayer", 0, 0))
        rows.append(ModuleDump(f"{layer}.norm", "RMSNorm", 64, 128))
        if i > 0:
            device, rule = ("cpu", "experts") if rewritten else ("", "")
            rows.append(ModuleDump(f"{layer}.mlp.experts", "TinyExperts", 2_000_000, 4_000_000, device, rule))
    return (*rows, ModuleDump("lm_head", "Linear", 64_000, 128_000))


def model(stage: str = "rewritten") -> ModelDump:
    rewritten = stage == "rewritten"
    match = MatchDump("experts", "moe_block", "model.layers.1.mlp", (("experts", "routed"), ("scores", "scores")))
    matches = tuple(replace(match, site=f"model.layers.{i}.mlp") for i in (1, 2, 3)) if stage != "captured" else ()
    near = ("11 nodes of `grouped` matched in model.layers.1.mlp, then at `best` expected scatter, found topk",)
    return ModelDump(SCHEMA, stage, "tiny", "bf16", modules(rewritten), (moe_block(rewritten),), matches, near)


def hostile() -> ModelDump:
    """A model all of whose strings are hostile, unlike each other where names must differ."""

    def spoiled(value: object) -> object:
        if isinstance(value, str):
            return HOSTILE + value
        return tuple(map(spoiled, value)) if isinstance(value, tuple) else value

    block = moe_block(rewritten=True)
    keep = {"input", "weight", "output"}
    nodes = [
        NodeDump(*(getattr(n, f) if f == "op" and n.op in keep else spoiled(getattr(n, f)) for f in NodeDump.__slots__))
        for n in block.nodes
    ]
    match = MatchDump(HOSTILE, HOSTILE, spoiled(block.sites)[0], ((HOSTILE, nodes[3].name),))
    module = ModuleDump(HOSTILE, HOSTILE, 1, 2, HOSTILE, HOSTILE)
    spoiled_block = BlockDump(HOSTILE, HOSTILE, spoiled(block.sites), (1,), tuple(nodes), (HOSTILE,))
    return ModelDump(SCHEMA, "rewritten", HOSTILE, HOSTILE, (module,), (spoiled_block,), (match,), (HOSTILE,))


def test_text_is_as_agreed(golden: Callable[[str, str], None]) -> None:
    golden("graph/model.txt", render_text(model()))


def test_text_of_one_layer_has_its_blocks_alone() -> None:
    assert "block mlp_1" in render_text(model(), 2)
    assert "modules" not in render_text(model(), 2)
    assert "block" not in render_text(model(), 0)


def test_colour_changes_no_word() -> None:
    coloured = render_text(model(), colour=True)
    assert "\x1b[" in coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in plain.split("\n")] == render_text(model()).split("\n")


def test_hostile_names_stay_on_their_line_of_text() -> None:
    text = render_text(hostile())
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e\ud800]", text)
    assert max(map(len, text.split("\n"))) < 2500


def test_equal_layers_are_one_line_of_the_tree() -> None:
    lines = {line.fqn: line for line in module_tree(modules())}
    assert lines["model.layers.[1..3]"].copies == 3
    assert lines["model.layers.[1..3]"].parameters == 2_000_064
    assert lines[""].parameters == 64_000 * 2 + 4 * 64 + 3 * 2_000_000
    assert "model.layers.0" in lines


def test_every_node_of_the_picture_has_its_facts() -> None:
    root = ElementTree.fromstring(render_svg(model()))
    titles = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    routed = next(title for title in titles if title.startswith("routed"))
    for fact in ("bf16[t, 64]", "cpu", "rule: experts", "moe-lora.ktr:12:3", "experts.down_proj", "bound: experts"):
        assert fact in routed
    assert len(titles) == len(place(moe_block()).boxes)
    assert not any("position_ids" in title for title in titles), "an input that nobody reads is not drawn"


def test_rewritten_nodes_have_the_colour_of_their_rule_and_a_legend() -> None:
    svg = render_svg(model())
    assert svg.count("rule-0 .box") == 2  # light and dark
    assert 'class="node operator rule-0"' in svg
    assert 'class="node operator rule-1"' in svg
    assert ">experts</text>" in svg
    assert "rule-" not in render_svg(model("captured"))


def test_pictures_are_the_same_each_time() -> None:
    assert render_svg(model()) == render_svg(model())
    assert render_html([model()]) == render_html([model()])


def test_boxes_do_not_overlap() -> None:
    boxes = place(moe_block()).boxes
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            apart = a.x + a.width <= b.x or b.x + b.width <= a.x or a.y + a.height <= b.y or b.y + b.height <= a.y
            assert apart, f"{a.node.name} and {b.node.name}"


def test_hostile_names_leave_the_svg_well_formed() -> None:
    root = ElementTree.fromstring(render_svg(hostile()))
    allowed = {"svg", "style", "rect", "g", "path", "title", "text", "tspan", "circle"}
    assert {element.tag.rpartition("}")[2] for element in root.iter()} <= allowed


def test_dot_is_as_agreed(golden: Callable[[str, str], None]) -> None:
    golden("graph/model.dot", render_dot(model()))


def test_hostile_names_stay_inside_their_dot_strings() -> None:
    without_strings = re.sub(r'"(?:[^"\\]|\\.)*"', '""', render_dot(hostile()))
    assert "alert" not in without_strings
    assert '"' not in without_strings.replace('""', "")
    assert without_strings.count("{") == without_strings.count("}") == 2


class Page(HTMLParser):
    """What a browser would see: the tags, the text of the script elements, and the attributes that load or run."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.outside: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "script":
            self.scripts.append("")
        for name, value in attrs:
            if name.startswith("on") or (name in ("src", "href") and not (value or "").startswith("#")):
                self.outside.append(f"{name}={value}")

    def handle_data(self, data: str) -> None:
        if self.get_starttag_text() and (self.get_starttag_text() or "").startswith("<script"):
            self.scripts[-1] += data if not self.scripts[-1] else ""


def test_the_page_is_one_file_that_loads_nothing() -> None:
    text = render_html([model(stage) for stage in ("captured", "matched", "rewritten")])
    page = Page(text)
    assert page.outside == []
    assert not page.tags & {"link", "img", "iframe", "object"}
    assert not re.search(r"@import|url\(", text)
    assert text.count('class="stage"') == 3
    data = json.loads(page.scripts[0])
    assert [stage["stage"] for stage in data] == ["captured", "matched", "rewritten"]


def test_the_page_lists_everything_without_scripts() -> None:
    text = re.sub(r"<script.*?</script>", "", render_html([model()]), flags=re.DOTALL)
    for shown in ("mlp_1", "TinyMoe", "model.layers.[1..3].mlp", "expected scatter, found topk", "routed: bf16[t, 64]"):
        assert shown in text


def test_hostile_names_add_no_element_to_the_page() -> None:
    text = render_html([hostile()])
    page, honest = Page(text), Page(render_html([model()]))
    assert len(page.scripts) == len(honest.scripts) == 2
    assert page.tags <= honest.tags
    assert page.outside == []
    assert "{{ 7*7 }}" in text.replace("&#39;", "'"), "a name is text, not a template"
    assert json.loads(page.scripts[0])[0]["blocks"][0]["nodes"][0]["name"].startswith("</script>")


def test_the_whole_model_has_its_equal_layers_and_the_bytes_of_each_device() -> None:
    seen = overview(model())
    assert [(part.name, part.copies, part.size, part.blocks) for part in seen.parts] == [
        ("model.embed", 1, "128 kB", ()), ("model.layers.0", 1, "128 B", ()),
        ("model.layers.[1..3]", 3, "12 MB", (0,)), ("lm_head", 1, "128 kB", ()),
    ]  # fmt: skip
    assert [(one.device, one.size) for one in seen.devices] == [
        ("cuda:0", "128 kB"), ("not placed", "129 kB"), ("cpu", "12 MB"),
    ]  # fmt: skip
    assert sum(one.share for one in seen.devices) == pytest.approx(1, abs=1e-3)
    empty = overview(replace(model(), modules=()))
    assert empty.parts == empty.devices == ()


def test_near_misses_of_blocks_that_another_pattern_matched_are_folded() -> None:
    text = render_html([model()])
    assert "<summary>1 in blocks that another pattern matched</summary>" in text and 'class="count"' not in text
    text = render_html([replace(model(), matches=())])
    assert "another pattern matched" not in text and '<span class="count">1</span>' in text


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 800, 1400])
def test_the_page_fits_and_opens_a_block_at_the_node_that_a_rule_made(tmp_path: Path, width: int) -> None:
    page = tmp_path / "graph.html"
    page.write_text(render_html([model(stage) for stage in ("captured", "matched", "rewritten")]))
    with opened_browser(width, 500) as browser:
        browser.get(page.as_uri())

        def value(script: str) -> Any:
            return browser.execute_script(f"return {script}")

        shown = "[...document.querySelectorAll('.overview')].filter(one => one.checkVisibility()).length"
        assert (value(shown), overflow(browser) <= 0) == (1, True)
        browser.execute_script("document.querySelectorAll('.blocks')[2].querySelectorAll('a')[1].click()")
        box, frame = (
            value(f"document.querySelector('#s2-b0 {part}').getBoundingClientRect().toJSON()")
            for part in (".node.operator.rule-0", ".canvas")
        )
        assert frame["left"] <= box["left"] and box["right"] <= frame["right"] + 1
        assert frame["top"] <= box["top"] and box["bottom"] <= frame["bottom"] + 1
        below = value("document.querySelector('.right').getBoundingClientRect().top") >= frame["bottom"] - 1
        assert (value(shown), below, overflow(browser) <= 0) == (0, width < 900, True)
        assert complaints(browser) == []


@pytest.mark.parametrize("render", [render_text, render_svg, render_dot, lambda dump: render_html([dump])])
def test_odd_blocks_are_drawn_all_the_same(render: Callable[[ModelDump], str]) -> None:
    loop = NodeDump("a", "add", "add", ("b", "a", "gone")), NodeDump("b", "add", "add", ("a",))
    blocks = (
        BlockDump("opaque_0", "Opaque", ("m.0",), (0,), (), ("a loop over experts",)),
        BlockDump("loop_0", "Loop", (), (), loop),
        BlockDump("one_0", "One", (), (), loop[:1]),
    )
    assert "opaque_0" in render(ModelDump(SCHEMA, "captured", "odd", "f32", (), blocks))
    assert render(ModelDump(SCHEMA, "captured", "empty", "f32", (), ()))


def test_a_long_chain_of_nodes_is_drawn_with_little_work() -> None:
    chain = [NodeDump("n0", "input", "n0", shape=(4,), dtype="f32")]
    chain += [NodeDump(f"n{i}", "add", "add", (f"n{i - 1}", f"n{i // 2}"), (), (4,), "f32") for i in range(1, 100)]
    dump = ModelDump(SCHEMA, "captured", "long", "f32", (), (BlockDump("b", "B", (), (), tuple(chain)),))
    calls(lambda: render_html([dump]), most=5_000_000)  # a layout that grows badly takes a thousand times as many


def test_a_difference_names_what_a_rewrite_did(golden: Callable[[str, str], None]) -> None:
    found = diff(model("captured"), model("rewritten"))
    golden("graph/rewrite.diff.txt", found.text())
    assert json.loads(json.dumps(found.to_json()))["blocks"][0]["key"] == "mlp_1"


def test_rows_that_only_moved_are_folded_into_what_is_around_them() -> None:
    def moved(device: str) -> ModelDump:
        nodes = tuple(replace(node, device=device) for node in model("captured").blocks[0].nodes)
        rows = tuple(replace(row, device=device if "layers" in row.fqn else "cpu") for row in modules())
        return replace(model("captured"), blocks=(replace(moe_block(), nodes=nodes),), modules=rows)

    found = diff(moved("cpu"), moved("cuda:0"))
    assert found.text().split("\n")[2:-1] == [
        "block mlp_1: TinyMoe  layers 1..3", "  ~ 16 nodes: device cpu -> cuda:0", "", "modules",
        "  ~ model.layers.0 and 1 below: device cpu -> cuda:0",
        "  ~ model.layers.[1..3] and 2 below: device cpu -> cuda:0", "  = 3 modules unchanged",
    ]  # fmt: skip
    assert len(found.to_json()["modules"]) == 11


def test_no_difference_is_false_and_says_so() -> None:
    found = diff(model(), model())
    assert not found
    assert found.text().endswith("no difference\n")


def test_a_module_that_took_the_place_of_an_operator_is_one_change() -> None:
    before, after = model("captured"), model("captured")
    nodes = tuple(replace(n, fqn="shared.up") if n.name == "up" else n for n in before.blocks[0].nodes)
    new_name = {"up": "shared_up"}
    renamed = tuple(
        replace(n, name=new_name.get(n.name, n.name), inputs=tuple(new_name.get(i, i) for i in n.inputs)) for n in nodes
    )
    before = replace(before, blocks=(replace(before.blocks[0], nodes=nodes),))
    after = replace(after, blocks=(replace(after.blocks[0], nodes=(*renamed, NodeDump("new", "add", "add"))),))
    kinds = [(n.kind, n.after and n.after.name) for n in diff(before, after).blocks[0].nodes]
    assert kinds == [("changed", "shared_up"), ("added", "new")]
    assert "- new = add()" in diff(after, before).text()


def test_blocks_and_modules_come_and_go() -> None:
    before, after = model(), replace(model(), blocks=(), modules=modules()[:1])
    assert "- block mlp_1: TinyMoe  layers 1..3" in diff(before, after).text()
    assert "+ block mlp_1" in diff(after, before).text()
    assert "- model.layers.[0..3].norm" in diff(before, after).text()


def test_labels() -> None:
    assert ranges([5, 0, 2, 3, 4]) == "0, 2..5"
    assert collapse(["m.1.a.2", "m.2.a.2", "m.4.a.2", "head"]) == ("m.[1..2, 4].a.2", "head")
    assert printable("a\nb\u202e") == "a\\nb\\u202e"
    assert len(printable("x" * 1000, 20)) == 20
    assert [quantity(n) for n in (7, 1234, 15.7e9)] == ["7", "1.23 k", "15.7 G"]


def test_a_picture_without_the_layout_library_is_refused_before_the_model_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ktc.stages.pictures.layout.importlib.util.find_spec", lambda name: None)
    for form in ("svg", "html"):
        with pytest.raises(HostLacks, match="H243"):
            render_graph(Request("/no/such/model", "moe-lora", "rewritten", None, form, None))
