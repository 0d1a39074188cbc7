"""Requests with images: answers are stock's, and what is not read is refused with 400 and its place."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from image_models import data_uri, image_processor, picture, png, stock_inputs, tokenizer

from ktc.foundation.images import ImageLimits
from ktc.inference.generate.language_model import LanguageModel
from ktc.inference.serving import server as serve
from ktc.inference.serving.models import ServedModel, ServedModels
from ktc.inference.serving.request import Limits
from ktc.model import twin
from ktc.model.hf.processor import read_processor

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in serve.PACKAGES), reason="the extra `serve` is not installed"
    ),
]

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
LIMITS = ImageLimits(num_bytes=1 << 16, pixels=1 << 14)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """The stock model itself: the server adds no other computation."""
    folder = tmp_path_factory.mktemp("processor")
    model: Any = twin.build(twin.shrink(twin.default_config("qwen3_vl_moe", whole=True)), seed=0)
    model.generation_config.eos_token_id = 1
    model.config.save_pretrained(folder)
    words = tokenizer(model.config)
    words.save_pretrained(folder)
    image_processor(model.config).save_pretrained(folder)
    return LanguageModel(model, words, "twin", "", 4096, read_processor(folder, "G732"))


def serving(opened: LanguageModel, **more: Any) -> Iterator[str]:
    from ktc.inference.serving.request_images import ImageAllowance

    listening = serve.listen("127.0.0.1", 0)
    server, _ = serve.make_server(
        ServedModels({"twin": ServedModel(opened)}), Limits(), images=ImageAllowance(2, LIMITS, **more)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield serve.url(listening)
    server.should_exit = True
    thread.join(timeout=20)


@pytest.fixture(scope="module")
def address(opened: LanguageModel) -> Iterator[str]:
    yield from serving(opened)


def ask(address: str, body: Any, path: str = "chat/completions") -> tuple[int, Any]:
    data = json.dumps({"temperature": 0, **body}).encode()
    asked = urllib.request.Request(f"{address}/{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=60) as reply:
            text = reply.read().decode()
            return reply.status, text if body.get("stream") else json.loads(text)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]


def part(uri: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri}}


def turn(*parts: Any, role: str = "user") -> list[Any]:
    return [{"role": role, "content": list(parts)}]


WORDS = {"type": "text", "text": "What is it?"}


def stock_answer(opened: LanguageModel, text: str, seeds: list[int], count: int = 12) -> str:
    model = opened.model
    inputs = stock_inputs(model, opened.tokenizer, text, [picture(seed) for seed in seeds])
    answer = model.generate(**inputs, max_new_tokens=count, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return str(opened.tokenizer.decode(answer, skip_special_tokens=True))


def test_one_prompt_with_two_images_has_two_answers_as_stocks(address: str, opened: LanguageModel) -> None:
    answers: list[str] = []
    for seeds in ([0], [1], [0], [0, 1]):
        text = "<|user|>" + IMAGE * len(seeds) + "What is it?<|end|><|assistant|>"
        wanted = stock_answer(opened, text, seeds)
        images = [part(data_uri(png(seed))) for seed in seeds]
        status, said = ask(address, {"messages": turn(*images, WORDS), "max_tokens": 12})
        assert status == 200, said
        assert said["choices"][0]["message"]["content"] == wanted
        answers.append(wanted)
    assert answers[0] == answers[2] and len(set(answers)) == 3
    status, said = ask(address, {"messages": turn(WORDS), "max_tokens": 12})
    assert said["choices"][0]["message"]["content"] == stock_answer(
        opened, "<|user|>What is it?<|end|><|assistant|>", []
    )


def test_images_are_read_in_streams_several_answers_and_responses(address: str, opened: LanguageModel) -> None:
    text = "<|system|>Be brief.<|end|><|user|>" + IMAGE + "What is it?<|end|><|assistant|>"
    wanted = stock_answer(opened, text, [1], 6)
    messages = [{"role": "system", "content": "Be brief."}, *turn(part(data_uri(png(1))), WORDS)]
    _, said = ask(address, {"messages": messages, "max_tokens": 6, "n": 2})
    assert [choice["message"]["content"] for choice in said["choices"]] == [wanted, wanted]
    _, streamed = ask(address, {"messages": messages, "max_tokens": 6, "stream": True})
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == wanted
    asked = [{"type": "input_image", "image_url": data_uri(png(1))}, {"type": "input_text", "text": "What is it?"}]
    status, said = ask(address, {"input": asked, "instructions": "Be brief.", "max_output_tokens": 6}, "responses")
    assert status == 200, said
    assert said["output"][0]["content"][0]["text"] == wanted


def test_requests_with_images_are_answered_beside_texts(address: str, opened: LanguageModel) -> None:
    """Positions behind images are kept by the model itself: they never mix between requests."""
    image = "<|user|>" + IMAGE + "What is it?<|end|><|assistant|>"
    given = [(turn(part(data_uri(png(at))), WORDS), image, [at]) for at in range(3)]
    given.insert(1, (turn(WORDS), "<|user|>What is it?<|end|><|assistant|>", []))
    wanted = [stock_answer(opened, text, seeds, 20) for _, text, seeds in given]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda asked: ask(address, {"messages": asked[0], "max_tokens": 20})[1], given))
    assert [said["choices"][0]["message"]["content"] for said in answers] == wanted


def test_low_detail_is_512_pixels_and_the_others_are_the_processors() -> None:
    from ktc.inference.serving.body_images import BodyImages
    from ktc.inference.serving.request_images import ImageAllowance, images_of, read_images

    def read(detail: str, *, flat: bool = False) -> Any:
        uri = data_uri(png(0, 1024, 64))
        one = {"type": "input_image", "image_url": uri, "detail": detail}
        body = {"messages": turn(one if flat else {"type": "image_url", "image_url": {"url": uri, "detail": detail}})}
        made = [{"role": "user", "content": [{"type": "image"}]}]
        given = images_of(body, body["messages"])
        return read_images(given, BodyImages(), ImageAllowance(), made)[0]["content"][0]["image"]

    low = picture(0, 1024, 64)
    low.thumbnail((512, 512))
    assert low.size == (512, 32) and read("low") == read("low", flat=True) == low
    assert read("auto") == read("high") == picture(0, 1024, 64)


def test_pixels_are_released_with_the_prompt(opened: LanguageModel) -> None:
    from ktc.inference.serving.generation import Generation
    from ktc.inference.serving.request import Request

    inputs = stock_inputs(opened.model, opened.tokenizer, f"<|user|>{IMAGE}What?", [picture(0)])
    ids = tuple(inputs.pop("input_ids")[0].tolist())
    del inputs["attention_mask"]
    passes: Any = Generation(Request("a", ids, 3, opened.model.generation_config, pixels=inputs), opened.model).passes
    assert passes._arguments["mm_encoder_outputs"]["image"] is not None
    first = passes.logits(ids).argmax().item()
    assert not {"pixel_values", "mm_encoder_outputs"} & passes._arguments.keys()
    passes.logits((*ids, first))


def test_places_in_responses_are_those_of_the_input(address: str) -> None:
    bad = {"type": "input_image", "image_url": "http://127.0.0.1:1/a.png"}
    for given, where in (
        (turn(bad), "input[0].content[0]"), ([bad], "input[0]"),
        ([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}, *turn(WORDS, bad)],
         "input[2].content[1]"),
    ):  # fmt: skip
        for more in ({}, {"instructions": "Be brief."}):
            given_parts = json.loads(json.dumps(given).replace('"text", "text"', '"input_text", "text"'))
            status, said = ask(address, {"input": given_parts, **more}, "responses")
            assert (status, said["param"]) == (400, where), said


SVG = data_uri(b"<svg/>", "image/svg+xml")
REFUSED: dict[str, tuple[list[Any], str, str]] = {
    "an address": (turn(part("http://127.0.0.1:1/a.png")), "invalid_image", "nothing is fetched"),
    "a file": (turn(part("file:///etc/passwd")), "invalid_image", "nothing is fetched"),
    "a path": (turn(part("/etc/passwd")), "invalid_image", "neither data nor an address"),
    "SVG": (turn(WORDS, part(SVG)), "invalid_image", "SVG drawing"),
    "a damaged one": (turn(part(data_uri(png()[:300]))), "invalid_image", "damaged or incomplete"),
    "many pixels": (turn(part(data_uri(png(0, 130, 130)))), "invalid_image", "130 x 130 pixels"),
    "many bytes": (turn(part(data_uri(bytes(1 << 17)))), "invalid_image", "more than 65536 bytes"),
    "three": (turn(*[part(data_uri(png()))] * 3), "too_many_images", "at most 2 images"),
    "of the assistant": (
        [*turn(part(data_uri(png())), role="assistant"), *turn(WORDS)], "invalid_value", "a turn of the user"
    ),
    "a detail": (
        turn({"type": "image_url", "image_url": {"url": data_uri(png()), "detail": "best"}}), "invalid_value",
        "`low` (at most 512 pixels",
    ),
    "without an address": (turn({"type": "image_url", "image_url": {}}), "invalid_value", "content"),
    "no object": (turn({"type": "image_url", "image_url": data_uri(png())}), "invalid_value", "content"),
    "a video": (turn({"type": "video_url", "video_url": {"url": "data:,"}}), "invalid_value", "content"),
    "a placeholder too many": (
        turn(part(data_uri(png())), {"type": "text", "text": "<|image_pad|>"}), "invalid_image", "does not take"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_with_its_place(address: str, name: str) -> None:
    messages, code, words = REFUSED[name]
    status, said = ask(address, {"messages": messages, "max_tokens": 2})
    assert (status, said["code"], said["type"]) == (400, code, "invalid_request_error")
    assert words in said["message"]
    assert said["param"].startswith("messages")


def test_images_are_those_that_the_handler_reads(address: str) -> None:
    blue = {"type": "input_image", "image_url": data_uri(png())}
    nested = {"type": "input_text", "text": "q", "content": [{"type": "input_image", "image_url": "http://a/b.png"}]}
    calls = {"role": "user", "content": [blue], "tool_calls": []}
    for given in ([{"role": "user", "content": [nested, blue]}], [calls, {"role": "user", "content": [blue]}]):
        status, said = ask(address, {"input": given, "max_output_tokens": 2}, "responses")
        assert status == 200, said
    three = [{"role": "user", "content": [blue] * 3, "tool_calls": []}]
    status, said = ask(address, {"input": three, "max_output_tokens": 2}, "responses")
    assert (status, said["code"], said["param"]) == (400, "too_many_images", "input[0].content[2]")


def test_a_model_of_text_refuses_images_by_name(opened: LanguageModel) -> None:
    for address in serving(replace(opened, processor=None)):
        status, said = ask(address, {"messages": turn(part(data_uri(png())), WORDS), "max_tokens": 2})
        assert (status, said["param"]) == (400, "messages[0].content[0]")
        assert "reads text alone" in said["message"]


def test_pixels_of_waiting_requests_are_bounded(opened: LanguageModel) -> None:
    body = {"messages": turn(part(data_uri(png())), WORDS), "max_tokens": 200}
    inputs = stock_inputs(opened.model, opened.tokenizer, IMAGE, [picture(0)])
    nbytes = sum(value.nbytes for name, value in inputs.items() if name in ("pixel_values", "image_grid_thw"))
    for address in serving(opened, pixel_bytes=nbytes + nbytes // 2):
        with ThreadPoolExecutor(4) as pool:
            statuses = [status for status, _ in pool.map(lambda url: ask(url, body), [address] * 4)]
        assert set(statuses) == {200, 429}
        status, said = ask(address, {**body, "max_tokens": 2, "n": 3})  # choices share their pixels
        assert status == 200, said
    for address in serving(opened, pixel_bytes=1):
        assert ask(address, body)[0] == 400, "it would never fit"


@pytest.mark.parametrize(
    "variables",
    [
        {"images": "/etc/hostname"}, {"images": "http://127.0.0.1:1/a.png"}, {"videos": "http://127.0.0.1:1/a.mp4"},
        {"min_pixels": 10**12}, {"do_resize": False}, {"device": "meta"},
        {"prompt": False}, {"processor": "x"},
    ],
)  # fmt: skip
def test_variables_of_the_template_reach_no_processor(
    address: str, opened: LanguageModel, variables: dict[str, Any]
) -> None:
    wanted = stock_answer(opened, "<|user|>" + IMAGE + "What is it?<|end|><|assistant|>", [0])
    body = {"messages": turn(part(data_uri(png())), WORDS), "max_tokens": 12, "chat_template_kwargs": variables}
    status, said = ask(address, body)
    assert status == 200, said
    assert said["choices"][0]["message"]["content"] == wanted
