"""The chat page: one file without addresses, and in a real browser streaming, stopping, adapters and safe Markdown."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import complaints, opened_browser, overflow, resize
from running_servers import served
from written_answers import write

from ktc.inference.serving import server as serve
from ktc.inference.serving.models import ServedModels, open_served_models
from ktc.inference.serving.request import Limits

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in serve.PACKAGES), reason="the extra `serve` is not installed"
    ),
]
KEY = "k" * 40
HOSTILE = """# Title
<script>window.hurt = 1</script><img src=x onerror="window.hurt = 2">
A [bad](javascript:window.hurt=3), a [good](https://example.org/a) and a ![picture](https://example.org/p.png).

| a | b |
|---|---|
| **1** | `x < y` |

1. one
   - inner
2. two

```html
<b>code</b>
```
> quoted *text*
"""


def test_the_page_has_no_address_of_another_server_and_makes_no_markup_of_texts() -> None:
    from ktc.inference.serving.chat_page import page, policy

    text = page()
    assert not re.search(r"\b(src|href)=[\"'](?!data:,)", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    script = re.search(r"<script>(.*)</script>", text, re.DOTALL)
    assert script is not None
    assert base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode() in policy(text)
    assert policy(text).startswith("default-src 'none'; ") and "unsafe" not in policy(text)


@pytest.fixture(scope="module")
def models(compiled: Path, adapter: Path) -> ServedModels:
    return open_served_models(compiled, (f"tuned={adapter}",), reference=True)


@pytest.fixture(scope="module")
def url(models: ServedModels) -> Iterator[str]:
    with served(models, Limits(batch=4)) as address:
        yield address.removesuffix("/v1")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened_browser() as opened:
        yield opened


def wait(browser: Any, script: str, seconds: float = 30) -> Any:
    """The value of a script as soon as it is true."""
    end = time.monotonic() + seconds
    while not (value := browser.execute_script(f"return {script}")):
        assert time.monotonic() < end, f"`{script}` did not become true: {browser.execute_script(TURNS)}"
        time.sleep(0.05)
    return value


TURNS = "return [...document.querySelectorAll('.turn')].map(turn => turn.innerText)"
ENDED = "!document.querySelector('[aria-busy]') && document.querySelectorAll('.turn.assistant .about').length"


def ask(browser: Any, text: str) -> None:
    browser.execute_script("one('prompt').value = arguments[0]; one('send').click()", text)


@pytest.mark.slow
def test_an_answer_streams_as_markdown_and_runs_nothing(
    browser: Any, url: str, models: ServedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(monkeypatch, models.default.opened.tokenizer, HOSTILE, pause=0.005)
    browser.get(url)
    wait(browser, "one('model').options.length === 2")
    ask(browser, "Hello <b>there</b>")
    wait(browser, "document.querySelector('[aria-busy] .text h1')?.textContent === 'Title'")  # before the end
    wait(browser, ENDED)
    inside = browser.execute_script("return document.querySelector('.turn.assistant .text').innerHTML")
    assert "&lt;script&gt;window.hurt = 1&lt;/script&gt;" in inside
    assert "<script" not in inside and "<img" not in inside and "javascript:" not in re.sub(r">[^<]*<", "><", inside)
    links = browser.execute_script("return [...document.querySelectorAll('.text a')].map(link => link.href)")
    assert links == ["https://example.org/a", "https://example.org/p.png"]
    assert (
        browser.execute_script("return document.querySelector('.turn.user .text').textContent") == "Hello <b>there</b>"
    )
    assert browser.execute_script("return [...document.querySelectorAll('.text td')].map(x => x.innerText)") == [
        "1",
        "x < y",
    ]
    assert browser.execute_script("return document.querySelector('.text pre').innerText") == "<b>code</b>"
    assert browser.execute_script("return document.querySelectorAll('.text ol > li').length") == 2
    assert browser.execute_script("return window.hurt ?? null") is None
    assert complaints(browser) == []


@pytest.mark.slow
def test_stop_ends_an_answer_at_the_server_too(
    browser: Any, url: str, models: ServedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(monkeypatch, models.default.opened.tokenizer, "rain " * 400, pause=0.02)
    browser.get(url)
    wait(browser, "one('model').value")
    ask(browser, "Hello")
    wait(browser, "document.querySelector('[aria-busy] .text')?.textContent.startsWith('rain rain')")
    browser.execute_script("one('stop').click()")
    wait(browser, ENDED)
    assert "stopped" in browser.execute_script(TURNS)[-1]
    end = time.monotonic() + 30
    while "ktc_requests_running 0.0" not in urllib.request.urlopen(f"{url}/metrics").read().decode():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_a_new_conversation_has_nothing_of_the_answer_under_way(
    browser: Any, url: str, models: ServedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(monkeypatch, models.default.opened.tokenizer, "rain " * 400, pause=0.02)
    browser.get(url)
    wait(browser, "one('model').options.length === 2")
    ask(browser, "Hello")
    wait(browser, "document.querySelector('[aria-busy] .text')?.textContent.startsWith('rain rain')")
    browser.execute_script("one('fresh').click()")
    wait(browser, "!running")
    assert browser.execute_script("return turns.length + document.querySelectorAll('.turn').length") == 0
    browser.execute_script("continues = true; one('model').dispatchEvent(new Event('change'))")
    assert browser.execute_script("return continues") is False


# Draws a text in pieces of some length, as an answer that grows, in `place`; `made` counts the nodes that were made.
DRAWN = """
const [text, piece] = arguments, place = document.createElement("div"), draw = growing(place);
const create = document.createElement;
let made = 0;
document.createElement = function (...given) { made++; return create.apply(this, given); };
for (let end = piece; end < text.length; end += piece) draw(text.slice(0, end), false);
draw(text, true);
document.createElement = create"""
BLOCKS = """Rain

> quoted
> more
- one
- two

  inner

1. first

| a | b |
|---|:-:|
| 1 | 2 |
| 3 | 4
after | the table

```c
| no | table |

``
```
~~~
open code
"""


@pytest.mark.slow
def test_a_growing_answer_is_drawn_as_the_whole_one(browser: Any, url: str) -> None:
    browser.get(url)
    script = f"{DRAWN}; return place.innerHTML"
    for text in (BLOCKS, HOSTILE, BLOCKS.replace("\n", "\r\n"), "| a |\n|---|", "", "x\n```\n```"):
        whole = browser.execute_script(
            "return node('div', {}, ...blocks(arguments[0].split(/\\r?\\n/))).innerHTML", text
        )
        for piece in (1, 2, 3, 7, 10_000):
            assert browser.execute_script(script, text, piece) == whole, (text, piece)


@pytest.mark.slow
@pytest.mark.parametrize("line", ["| 1 | 2 |\n", "words of a paragraph\n\n", "code\n"], ids=["table", "text", "code"])
def test_the_nodes_that_a_growing_answer_makes_are_in_proportion_to_its_length(
    browser: Any, url: str, line: str
) -> None:
    browser.get(url)
    head = {"|": "| a | b |\n|---|---|\n", "c": "```\n"}.get(line[0], "")
    once, twice = (browser.execute_script(f"{DRAWN}; return made", head + line * rows, 5) for rows in (300, 600))
    assert twice <= 2.1 * once + 50


# Draws a text as an answer that grows; `read` counts the characters in which marks are looked for.
READ = (
    "let read = 0; MARKS.exec = text => { read += text.length; return RegExp.prototype.exec.call(MARKS, text); };"
    f"{DRAWN}; delete MARKS.exec"
)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["", "# ", "> ", "1. ", "| a |\n|---|\n| "], ids=str)
def test_the_marks_of_a_long_line_are_looked_for_in_time_of_its_length(browser: Any, url: str, head: str) -> None:
    browser.get(url)
    once, twice = (browser.execute_script(f"{READ}; return read", head + "[ " * n, 64) for n in (20_000, 40_000))
    assert 0 < twice <= 2.1 * once
    text = f"{head}{'rain ' * 2000}**now**\n\nThen *it*\n\nends"
    whole = browser.execute_script("return node('div', {}, ...blocks(arguments[0].split('\\n'))).innerHTML", text)
    assert browser.execute_script(f"{DRAWN}; return place.innerHTML", text, 999) == whole


REFUSE = """
window.fetch = (path, given) => {
  window.sent = JSON.parse(given.body);
  return Promise.resolve(new Response(arguments[0], {status: arguments[1]}));
}"""
FAULT = '{"error": {"message": "no place", "code": "x"}}'
SHOWN_QUESTIONS = "return [...document.querySelectorAll('.turn.user .text')].map(text => text.textContent)"


@pytest.mark.slow
def test_a_failed_question_is_asked_again_once_and_a_text_typed_meanwhile_stays(browser: Any, url: str) -> None:
    browser.get(url)
    wait(browser, "one('model').value")
    browser.execute_script(REFUSE, FAULT, 429)
    ask(browser, "Hello")
    wait(browser, "document.querySelector('.turn .fault')?.textContent === 'no place'")
    assert browser.execute_script("return [one('prompt').value, turns.length]") == ["Hello", 0]
    browser.execute_script("one('send').click(); one('prompt').value = 'typed'")
    wait(browser, "!running")
    assert browser.execute_script("return one('prompt').value") == "typed"
    assert browser.execute_script(SHOWN_QUESTIONS) == ["Hello"]
    assert browser.execute_script("return document.querySelectorAll('.turn').length") == 2


@pytest.mark.slow
def test_a_question_whose_answer_has_no_text_is_not_sent_again(browser: Any, url: str) -> None:
    browser.get(url)
    wait(browser, "one('model').value")
    thought = 'data: {"choices": [{"delta": {"reasoning_content": "Hm."}, "finish_reason": "length"}]}\n\n'
    browser.execute_script(REFUSE, thought, 200)
    ask(browser, "Hello")
    wait(browser, ENDED)
    assert "no text" in browser.execute_script(TURNS)[-1]
    ask(browser, "And now?")
    wait(browser, "!running && document.querySelectorAll('.turn.assistant').length === 2")
    assert browser.execute_script("return sent.messages.map(turn => turn.content)") == ["And now?"]
    assert browser.execute_script("return turns.length") == 0


@pytest.mark.slow
def test_headings_are_read_in_time_of_their_length(browser: Any, url: str) -> None:
    browser.get(url)
    heads = [
        "# x" + " " * 50_000 + "y",
        "# " + "#" * 50_000 + "x",
        "# " + " " * 50_000 + "x\u2028y",
        "## It ## ",
        "# C#",
    ]
    texts = [browser.execute_script(f"{DRAWN}; return place.firstChild.textContent", head, len(head)) for head in heads]
    assert texts[3:] == ["It", "C#"] and texts[0].startswith("x ")


@pytest.mark.slow
def test_the_adapter_is_the_readers_choice_and_a_conversation_goes_on(browser: Any, url: str) -> None:
    browser.get(url)
    wait(browser, "one('model').options.length === 2")
    browser.execute_script("one('max_tokens').value = 4; one('model').value = 'tuned'")
    ask(browser, "Hello")
    wait(browser, ENDED)
    ask(browser, "And now?")
    wait(browser, f"({ENDED}) === 2")
    assert browser.execute_script("return turns.map(turn => turn.role)") == ["user", "assistant"] * 2
    assert all("tuned" in text for text in browser.execute_script(TURNS)[1::2])


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 800, 1400])
def test_the_page_fits_any_width(browser: Any, url: str, models: ServedModels, width: int, monkeypatch: Any) -> None:
    write(monkeypatch, models.default.opened.tokenizer, HOSTILE + "wide" * 200)
    resize(browser, width)
    browser.get(url)
    wait(browser, "one('model').value")
    ask(browser, "Hello " + "long" * 100)
    wait(browser, ENDED)
    assert overflow(browser) <= 0


@pytest.mark.slow
def test_a_server_with_a_key_shows_the_page_and_asks_for_the_key(browser: Any, models: ServedModels) -> None:
    with served(models, Limits(), key_sha256=hashlib.sha256(KEY.encode()).digest()) as address:
        browser.get(address.removesuffix("/v1"))
        wait(browser, "!one('locked').hidden")
        browser.execute_script("one('key').value = arguments[0]; one('key').dispatchEvent(new Event('change'))", KEY)
        assert wait(browser, "one('model').value") == models.default.opened.name
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{address}/models")
        assert refused.value.code == 401
