"""A server takes new weights and adapters while it answers, from whom it should, or stays as it was."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from other_weights import Tensors, rewritten
from running_servers import served
from safetensors.torch import load_file, save_file

from ktc.cli import app as cli
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.inference.generate.answers import Sampling, answer
from ktc.inference.generate.language_model import LanguageModel, open_language_model
from ktc.inference.generate.prompts import render
from ktc.inference.serving import server as serve
from ktc.inference.serving.models import open_served_models
from ktc.inference.serving.request import Limits

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in serve.PACKAGES), reason="the extra `serve` is not installed"
    ),
]
KEY = "k" * 40
TEXT = "Rain falls"


@pytest.fixture(scope="module")
def root(checkpoint: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of updates, with an adapter and two sets of weights."""
    folder = tmp_path_factory.mktemp("updates")
    shutil.copytree(adapter, folder / "tuned")
    shutil.copytree(checkpoint, folder / "first" / checkpoint.name)
    rewritten(checkpoint, folder / "second" / checkpoint.name)
    return folder


@pytest.fixture(scope="module")
def address(compiled: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server, which every test leaves with the first weights and without adapters."""
    from ktc.inference.serving.update_routes import read_access

    key = tmp_path_factory.mktemp("secret") / "key"
    key.touch(mode=0o600)
    key.write_text(f"{KEY}\n")
    models = open_served_models(compiled, reference=True)
    with served(models, Limits(batch=4), read_access(root, key)) as url:
        yield url.removesuffix("/v1")


def posted(url: str, body: Any, key: str | None = KEY) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    if key is not None:
        asked.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(asked, timeout=60) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or "null")


def completion(address: str, num_tokens: int = 10, model: str | None = None) -> str:
    body = {"prompt": TEXT, "max_tokens": num_tokens, "temperature": 0, **({"model": model} if model else {})}
    status, found = posted(f"{address}/v1/completions", body, None)
    assert status == 200, found
    return found["choices"][0]["text"]


@cache
def opened_model(compiled: Path, adapter: Path | None, weights: Path | None) -> LanguageModel:
    return open_language_model(compiled, reference=True, adapter=adapter, weights=weights)


def expected(compiled: Path, num_tokens: int = 10, *, adapter: Path | None = None, weights: Path | None = None) -> str:
    opened = opened_model(compiled, adapter, weights)
    return answer(opened, render(opened, TEXT, raw=True), Sampling(num_tokens))[0].text


def metric(address: str, name: str) -> float:
    with urllib.request.urlopen(f"{address}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def wait_for(address: str, name: str, wanted: float) -> None:
    end = time.monotonic() + 60
    while metric(address, name) != wanted:
        assert time.monotonic() < end, f"{name} is {metric(address, name)}"
        time.sleep(0.01)


def test_new_weights_wait_for_running_requests_which_keep_the_old_ones(
    address: str, compiled: Path, root: Path, checkpoint: Path
) -> None:
    new, applied_weights = f"second/{checkpoint.name}", 'ktc_updates_total{kind="weights",outcome="applied"}'
    count = metric(address, applied_weights)
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(completion, address, 90)
        wait_for(address, "ktc_requests_running", 1)
        update = pool.submit(posted, f"{address}/updates/weights", {"folder": new})
        status, applied = update.result()
        assert (status, applied["applied"]) == (200, new), applied
        assert running.result(timeout=60) == expected(compiled, 90)  # its client may read the end a little later
    assert completion(address) == expected(compiled, weights=root / new) != expected(compiled)
    assert metric(address, applied_weights) == count + 1
    assert posted(f"{address}/updates/weights", {"folder": f"first/{checkpoint.name}"})[0] == 200
    assert completion(address) == expected(compiled)


def test_requests_that_come_while_weights_wait_are_answered_by_the_new_ones(
    address: str, compiled: Path, root: Path, checkpoint: Path
) -> None:
    new = f"second/{checkpoint.name}"
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(completion, address, 40) for _ in range(3)]
        update = pool.submit(posted, f"{address}/updates/weights", {"folder": new})
        later = list[str]()
        while not update.done():
            later.append(completion(address, 4))
        assert update.result()[0] == 200
    both = {expected(compiled, 40), expected(compiled, 40, weights=root / new)}
    assert {each.result() for each in asked} <= both
    assert set(later) <= {expected(compiled, 4), expected(compiled, 4, weights=root / new)}
    assert completion(address, 4) == expected(compiled, 4, weights=root / new)
    assert posted(f"{address}/updates/weights", {"folder": f"first/{checkpoint.name}"})[0] == 200


def test_requests_that_run_too_long_leave_the_old_weights(address: str, compiled: Path, checkpoint: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(completion, address, 90)
        wait_for(address, "ktc_requests_running", 1)
        status, said = posted(f"{address}/updates/weights", {"folder": f"second/{checkpoint.name}", "patience": 0})
        assert (status, "patience" in said["error"]["message"]) == (503, True)
        assert running.result() == expected(compiled, 90)
    assert completion(address) == expected(compiled)
    assert metric(address, 'ktc_updates_total{kind="weights",outcome="timed out"}') >= 1


def with_nan(tensors: Tensors) -> None:
    tensors[next(iter(tensors))].view(-1)[3] = torch.nan


def test_faulty_weights_leave_the_old_ones(address: str, compiled: Path, root: Path, checkpoint: Path) -> None:
    before, refused = completion(address, 40), 'ktc_updates_total{kind="weights",outcome="refused"}'
    count = metric(address, refused)
    for number, change in enumerate((with_nan, lambda tensors: tensors.popitem())):
        folder = rewritten(checkpoint, root / f"faulty_{number}", change)
        status, said = posted(f"{address}/updates/weights", {"folder": folder.name})
        assert status == 400
        assert said["refused"][0]["code"] in ("L407", "I115"), said
        assert completion(address, 40) == before
    assert metric(address, refused) == count + 2


def test_adapters_are_loaded_replaced_and_removed_by_name(
    address: str, compiled: Path, root: Path, adapter: Path
) -> None:
    url, stronger = f"{address}/updates/adapters", root / "stronger"
    shutil.copytree(adapter, stronger)
    tensors = load_file(stronger / "adapter_model.safetensors")
    save_file({name: tensor * 1.7 for name, tensor in tensors.items()}, stronger / "adapter_model.safetensors")
    assert posted(url, {"name": "a/1", "folder": "tuned"})[0] == 200
    assert completion(address, model="a/1") == expected(compiled, adapter=adapter) != expected(compiled)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(completion, address, 90, "a/1")
        wait_for(address, "ktc_requests_running", 1)
        assert posted(url, {"name": "a/1", "folder": "stronger"})[0] == 200
        assert not running.done()
        assert completion(address, model="a/1") == expected(compiled, adapter=stronger)
        assert running.result() == expected(compiled, 90, adapter=adapter)
    assert completion(address) == expected(compiled)
    assert posted(f"{url}/remove", {"name": "a/1"})[0] == 200
    status, said = posted(f"{address}/v1/completions", {"prompt": TEXT, "model": "a/1"}, None)
    assert (status, "a/1" in said["error"]["message"]) == (404, True)
    assert completion(address) == expected(compiled)
    assert posted(url, {"name": "b", "folder": "tuned"})[0] == 200
    assert completion(address, model="b") == expected(compiled, adapter=adapter)
    assert posted(f"{url}/remove", {"name": "b"})[0] == 200


def spoil(folder: Path, fault: str) -> None:
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors = load_file(weights)
    if fault == "NaN":
        with_nan(tensors)
        save_file(tensors, weights)
    elif fault == "rank":
        config.write_text(json.dumps({**json.loads(config.read_text()), "r": 1_000_000_000}))
    elif fault == "shape":
        save_file({name: torch.cat([t, t], dim=-1) for name, t in tensors.items()}, weights)
    elif fault == "a pipe":
        weights.unlink()
        os.mkfifo(weights)
    else:
        weights.write_bytes(weights.read_bytes()[:-7])


FAULTS = {"NaN": "A602", "rank": "A602", "shape": "A603", "a pipe": "G728", "truncated": "A602", "half": "A605"}


@pytest.mark.parametrize(("fault", "code"), FAULTS.items())
def test_a_faulty_adapter_leaves_the_model_as_it_was(
    address: str, root: Path, adapter: Path, fault: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, folder = completion(address, 30), root / f"adapter {fault}"
    shutil.copytree(adapter, folder)
    if fault == "half":  # PEFT took a part of it only

        def whole(*_: Any) -> None:
            raise InputRefused(Diagnostic("A605", "a part only"))

        monkeypatch.setattr("ktc.adapters.adapter.require_whole", whole)
    else:
        spoil(folder, fault)
    status, said = posted(f"{address}/updates/adapters", {"name": "x", "folder": folder.name})
    assert (status, said["refused"][0]["code"]) == (400, code), said
    assert completion(address, 30) == before
    assert posted(f"{address}/v1/completions", {"prompt": TEXT, "model": "x"}, None)[0] == 404


def test_only_the_key_admits(address: str, root: Path) -> None:
    count = metric(address, "ktc_updates_total")
    for key in (None, "", "other", KEY[:-1], KEY + "k", "\u00e4" * 40):
        for path in ("weights", "adapters", "adapters/remove"):
            status, said = posted(f"{address}/updates/{path}", {"folder": "tuned", "name": "x"}, key and key)
            assert (status, KEY in str(said)) == (401, False)
    assert metric(address, "ktc_updates_total") == count


OUTSIDE = ["", ".", "..", "../..", "/etc", "tuned/../..", "missing", "tuned/adapter_config.json", "a\0b", "x" * 5000,
           "linked", "leaves"]  # fmt: skip


def test_only_whole_folders_below_the_root_are_read(address: str, root: Path, adapter: Path) -> None:
    (root / "linked").symlink_to("/etc")
    (root / "leaves").mkdir()
    (root / "leaves" / "adapter_model.safetensors").symlink_to(adapter / "adapter_model.safetensors")
    for folder in OUTSIDE:
        status, said = posted(f"{address}/updates/weights", {"folder": folder})
        assert (status, said["refused"][0]["code"]) == (400, "G728"), folder


BODIES: list[tuple[Any, int]] = [
    (b"", 400), (b"{", 400), (b"[" * 100_000, 413), ([], 400), ({}, 400), ({"folder": 3}, 400),
    ({"folder": "tuned", "more": 1}, 400), ({"folder": "tuned", "patience": -1}, 400),
    (b'{"folder": "tuned", "patience": NaN}', 400), ({"folder": "tuned", "patience": 10**9}, 400),
    (b'{"folder": "\\ud83d"}', 400),
]  # fmt: skip


def test_other_bodies_are_refused(address: str, compiled: Path) -> None:
    for body, status in BODIES:
        assert posted(f"{address}/updates/weights", body)[0] == status, body
    for name in ("", "x" * 300, "a\nb", compiled.name):
        status, said = posted(f"{address}/updates/adapters", {"name": name, "folder": "tuned"})
        assert (status, said["refused"][0]["code"]) == (400, "G729"), name
    assert posted(f"{address}/updates/adapters/remove", {"name": "unknown"})[1]["refused"][0]["code"] == "G729"


def test_one_update_at_a_time(address: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ktc.model.loading.refresh import Stage

    entered, go_on, fill = threading.Event(), threading.Event(), Stage.fill

    def slow(*given: Any) -> Any:
        entered.set()
        assert go_on.wait(60)
        return fill(*given)

    monkeypatch.setattr(Stage, "fill", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(posted, f"{address}/updates/weights", {"folder": f"first/{checkpoint.name}"})
        assert entered.wait(60)
        assert completion(address)
        assert posted(f"{address}/updates/adapters", {"name": "x", "folder": "tuned"})[0] == 409
        go_on.set()
        assert first.result()[0] == 200


def test_without_a_key_there_are_no_updates(compiled: Path) -> None:
    with served(open_served_models(compiled, reference=True), Limits()) as url:
        assert posted(url.replace("/v1", "/updates/weights"), {"folder": "x"})[0] == 404


def test_a_key_is_secret_and_long(root: Path, tmp_path: Path, compiled: Path, capfd: Any) -> None:
    from ktc.inference.serving.update_routes import read_access

    def refused(folder: Path | None, key: Path | None) -> str:
        with pytest.raises(InputRefused) as error:
            read_access(folder, key)
        (found,) = error.value.diagnostics
        assert found.code == "G727"
        return found.message

    key = tmp_path / "key"
    assert "together" in refused(root, None)
    assert "cannot be read" in refused(root, key)
    key.write_text(KEY)
    key.chmod(0o644)
    assert "other users" in refused(root, key)
    key.chmod(0o600)
    assert "no folder" in refused(root / "missing", key)
    for short in ("", "short", "with a space inside it", "ü" * 40):
        key.write_text(short)
        assert "does not hold" in refused(root, key)
    assert cli.main(["serve", str(compiled), "--reference", "--port", "0", "--updates", str(root)]) == 2
    assert "G727" in capfd.readouterr().err
