"""The private names of transformers' server that `ktc/inference/serving/private_api.py` holds are there."""

from __future__ import annotations

import pytest

from ktc.foundation import versions


def test_handlers_of_requests_check_and_configure_where_ours_do() -> None:
    pytest.importorskip("fastapi")
    from transformers.cli.serving.chat_completion import ChatCompletionHandler

    for name in (
        "_validate_request",
        "_build_generation_config",
        "_resolve_model",
        "_non_streaming",
    ):
        assert callable(getattr(ChatCompletionHandler, name))


def test_an_input_of_responses_becomes_messages_and_nested_tools() -> None:
    pytest.importorskip("fastapi")
    from transformers.cli.serving.response import ResponseHandler

    messages = ResponseHandler._normalize_input({"input": "Hello", "instructions": "Answer."})
    assert [turn["role"] for turn in messages] == ["system", "user"]
    assert ResponseHandler._normalize_tools([{"type": "function", "name": "f"}]) == [
        {"type": "function", "function": {"name": "f"}}
    ]


def test_an_error_of_a_stream_carries_a_message() -> None:
    pytest.importorskip("fastapi")
    from ktc.inference.serving.private_api import StreamError

    assert StreamError("out of luck").msg == "out of luck"


def test_models_whose_tool_calls_are_read_are_known() -> None:
    pytest.importorskip("fastapi")
    from transformers import AutoConfig

    from ktc.inference.serving.private_api import reads_tool_calls

    class Model:
        config = AutoConfig.for_model("gpt2")

    assert not reads_tool_calls(object(), Model(), "")
    Model.config = AutoConfig.for_model("qwen3_moe")
    if versions.release(versions.installed("transformers") or "0") >= (5, 10):
        assert reads_tool_calls(object(), Model(), "<|im_start|>assistant\n")
        assert not reads_tool_calls(object(), Model(), "<|assistant|>")
