"""The processor of an adapter has that adapter's tokenizer and template; nothing else of it differs."""

from __future__ import annotations

from types import SimpleNamespace

from ktc.model.hf.processor import with_tokenizer


def test_an_adapters_tokenizer_and_template_serve_its_images() -> None:
    base = SimpleNamespace(
        tokenizer=SimpleNamespace(chat_template="a"), chat_template="images", image_processor=object()
    )
    plain, own = SimpleNamespace(chat_template=None), SimpleNamespace(chat_template="trained")
    assert with_tokenizer(base, base.tokenizer) is base
    assert with_tokenizer(None, own) is None
    with_own = with_tokenizer(base, own)
    assert (with_own.tokenizer, with_own.chat_template) == (own, "trained")
    assert with_own.image_processor is base.image_processor
    assert with_tokenizer(base, plain).chat_template == "images"
    assert base.chat_template == "images"
