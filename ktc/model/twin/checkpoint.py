"""Small twins as checkpoint folders in Hugging Face's format: shards, index, tokenizer, chat template.

Input: the name of a family and a cache folder. Output: the checkpoint's folder. Refused: a name that is not a causal
LM family.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.foundation.files import new_folder
from ktc.model.hf import model_names
from ktc.model.hf.model_names import TWIN_SETTINGS, require_twin
from ktc.model.hf.stock_loading import no_progress_bars
from ktc.model.twin.build import build
from ktc.model.twin.families import default_config
from ktc.model.twin.shrink import shrink

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPECIAL = {"pad_token": "<|pad|>", "bos_token": "<|begin|>", "eos_token": "<|end|>"}
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_TEXT = """
A mixture of experts sends every token to a few of its many small networks. The router scores all of them, keeps the
best, and adds up what they answer, each weighted by its score. Most of the parameters rest while one token passes.
To fine-tune such a model, the base stays frozen and a pair of thin matrices is trained beside each linear layer.
Question: what is the capital of France? Answer: the capital of France is Paris.
Question: what is the capital of Japan? Answer: the capital of Japan is Tokyo.
Question: how many legs has a spider? Answer: a spider has eight legs, an ant has six, a bird has two.
The quick brown fox jumps over the lazy dog, and the dog does not care. Rain falls on the hills, runs into the river,
and the river carries it to the sea. When the sun returns, the water rises again, and so the circle is closed.
She wrote the letter, read it twice, and put it in a drawer; some words are better kept than sent.
def add(a, b): return a + b
for i in range(10): print(i, add(i, i))
{"name": "value", "numbers": [1, 2, 3, 4, 5, 6, 7, 8, 9, 0], "truth": true}
"""


def names() -> tuple[str, ...]:
    """Return the families whose twins have specific settings; `tiny:NAME` may also name any other causal LM family."""
    return tuple(TWIN_SETTINGS)


def write(name: str, cache_dir: Path) -> Path:
    """Return the checkpoint folder of the twin `name` (bf16, shards, tokenizer) below `cache_dir`; create it if
    missing.

    Its name contains a digest of this package and of the transformers version: a changed recipe creates another folder,
    and no older compiled model loses its weights. Raises `InputRefused` for a name that is not a causal LM family,
    `HostLacks` (H229) if the folder cannot be written.
    """
    require_twin(name, frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    folder = cache_dir / f"{name}-{_recipe_digest()}"
    if folder.is_dir():
        return folder
    try:
        with new_folder(folder) as unfinished:
            _write_checkpoint(name, unfinished)
    except OSError as error:
        if folder.is_dir():  # another process was first, with the same content
            return folder
        message = f"the small twin cannot be written to `{cache_dir}`: {error.strerror or error}"
        hint = "set another cache folder with `KTC_CACHE_DIR`"
        raise HostLacks(Diagnostic("H229", message, hint=hint)) from error
    return folder


def _recipe_digest() -> str:
    from transformers import __version__

    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(model_names.__file__)]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files) + __version__.encode()).hexdigest()[:10]


def _write_checkpoint(name: str, folder: Path) -> None:
    tokenizer = _train_tokenizer()
    settings = TWIN_SETTINGS.get(name)
    config = shrink(default_config(name) if settings is None else AutoConfig.for_model(name, **settings))
    for setting in [name for name in config.to_dict() if name.startswith("vocab_size")]:
        setattr(config, setting, len(tokenizer))  # a model may have a second table, such as one for its layers
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, token, getattr(tokenizer, token))
    model = build(config, seed=0, dtype=torch.bfloat16)
    model.generation_config.do_sample = False
    with no_progress_bars():
        model.save_pretrained(folder, max_shard_size="250KB")
    tokenizer.save_pretrained(folder)


def _train_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[*_SPECIAL.values(), *_ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.strip().splitlines(), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=2048, **_SPECIAL)
    fast.chat_template = _CHAT_TEMPLATE
    return fast
