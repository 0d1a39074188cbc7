"""Tokenizers of every kind, trained in milliseconds: byte-level BPE, SentencePiece's two, WordPiece, letters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

END, BEGIN = "<|end|>", "<s>"
_SPECIAL = ["<unk>", BEGIN, END, "[CLS]", "[SEP]"]
_BYTES = [f"<0x{number:02X}>" for number in range(256)]
_LEARNED = [
    "Say: the capital of France is Paris of the world\n\n### Human: hi there\n\n### Assistant: of course",
    "unhappy café au lait 日本語です 😀 👍🏽 <|user|>\n <|assistant|>\n line\n\nnext",
] * 20


def _fast(built: Tokenizer, trainer: Any, adds: str = "$A") -> PreTrainedTokenizerFast:
    """Train it, and let it add special tokens to every text as `adds` says."""
    built.train_from_iterator(_LEARNED, trainer)
    if adds != "$A":
        named = [(name, built.token_to_id(name)) for name in _SPECIAL if name in adds]
        template = processors.TemplateProcessing(single=adds, special_tokens=named)
        trimming = built.post_processor
        built.post_processor = template if trimming is None else processors.Sequence([trimming, template])
    return PreTrainedTokenizerFast(
        tokenizer_object=built, bos_token=BEGIN, eos_token=END, pad_token=END, unk_token="<unk>"
    )


def _byte_level(*, trim: bool, adds: str = "$A") -> PreTrainedTokenizerFast:
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.post_processor = processors.ByteLevel(trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _fast(built, trainers.BpeTrainer(vocab_size=480, special_tokens=_SPECIAL, initial_alphabet=alphabet), adds)


def _sentencepiece(scheme: str, *, split: bool = True, adds: str = f"{BEGIN} $A") -> PreTrainedTokenizerFast:
    built = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence(pieces if scheme == "never" else [*pieces, decoders.Strip(" ", 1, 0)])
    return _fast(built, trainers.BpeTrainer(vocab_size=480, special_tokens=[*_SPECIAL, *_BYTES]), adds)


def _llama() -> PreTrainedTokenizerFast:
    """As Llama 2's: the space before every text is the normalizer's, and words are not split."""
    built = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    built.decoder = decoders.Sequence(pieces)
    return _fast(built, trainers.BpeTrainer(vocab_size=480, special_tokens=[*_SPECIAL, *_BYTES]), f"{BEGIN} $A")


def _unigram(scheme: str) -> PreTrainedTokenizerFast:
    built = Tokenizer(models.Unigram())
    built.normalizer = normalizers.NFKC()
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    built.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _fast(built, trainers.UnigramTrainer(vocab_size=120, special_tokens=_SPECIAL, unk_token="<unk>"))


def _word_piece() -> PreTrainedTokenizerFast:
    built = Tokenizer(models.WordPiece(unk_token="<unk>"))
    built.normalizer = normalizers.BertNormalizer(lowercase=True)
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece()
    return _fast(built, trainers.WordPieceTrainer(vocab_size=200, special_tokens=_SPECIAL), "[CLS] $A [SEP]")


def _letters() -> PreTrainedTokenizerFast:
    built = Tokenizer(models.WordLevel(unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    built.decoder = decoders.Fuse()
    return _fast(built, trainers.WordLevelTrainer(special_tokens=_SPECIAL))


class InPython(PreTrainedTokenizer):
    """A tokenizer in Python, which knows no places of characters: words with the space before them, and letters."""

    def __init__(self, **settings: Any) -> None:
        self._ids: dict[str, int] = {name: number for number, name in enumerate(_SPECIAL)}
        super().__init__(bos_token=BEGIN, eos_token=END, pad_token=END, unk_token="<unk>", **settings)

    @property
    def vocab_size(self) -> int:
        return len(self._ids)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return re.findall(r"(?s) ?\w+|\n+|.", text)

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids.setdefault(token, len(self._ids))

    def _convert_id_to_token(self, index: int) -> str:
        return list(self._ids)[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


BUILT: Mapping[str, Callable[[], Any]] = {
    "byte-level BPE": lambda: _byte_level(trim=False),
    "byte-level BPE, trimmed offsets": lambda: _byte_level(trim=True, adds=f"{BEGIN} $A"),
    "SentencePiece BPE, a space before all": lambda: _sentencepiece("always"),
    "SentencePiece BPE, before the first": lambda: _sentencepiece("first"),
    "SentencePiece BPE, no space": lambda: _sentencepiece("never", split=False),
    "SentencePiece BPE, an end after all": lambda: _sentencepiece("first", adds=f"{BEGIN} $A {END}"),
    "Llama 2's BPE": _llama,
    "unigram, a space before all": lambda: _unigram("always"),
    "unigram, no space": lambda: _unigram("never"),
    "WordPiece": _word_piece,
    "letters": _letters,
    "bytes in Python": ByT5Tokenizer,
    "words in Python": InPython,
}
