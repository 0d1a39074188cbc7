"""Small twins of a model family: a config shrunk to witness size, the model built from it, a checkpoint written of it.

In: any causal-LM config of transformers, or one of `names()`. Out: a config, a stock model with seeded weights, or a
checkpoint folder as Hugging Face writes it (shards, index, tokenizer). Refused: a name that is not in `names()`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

NUM_EXPERTS = 16
NUM_GROUPS = 4  # 4 * 2 < 16: a group holds more than the two experts whose scores some routers add
TOPK_GROUP = 2  # below top_k, so that the group limit changes which experts win
TOP_K = 4
NUM_HEADS = 4
VOCAB = 256

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_KS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
# The size each attribute shrinks to. An attribute that the config lacks, or that is None or 0 there, stays as it is.
_SIZES: Mapping[str, int] = {
    **dict.fromkeys(_EXPERT_COUNTS, NUM_EXPERTS),
    **dict.fromkeys(_TOP_KS, TOP_K),
    "hidden_size": 64,
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 56,
    "num_attention_heads": NUM_HEADS,
    "head_dim": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_shared_experts": 2,
    "sliding_window": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 64,
    "vocab_size": VOCAB,
}
_KEEP_IF_SMALLER = (*_TOP_KS, "n_shared_experts")
_DENSE_FIRST = ("first_k_dense_replace", "moe_layer_start_index")

# What sets each twin apart; everything else is the family's default, shrunk.
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {},
    "qwen3_moe": {"norm_topk_prob": True},
}

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
    """The families that `tiny:NAME` can name."""
    return tuple(_FAMILIES)


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """A witness-sized copy of `config`: the same class and flags with small dimensions; `config` stays as it is.

    Flags that choose another computation keep their meaning: no group stays no group, no query compression stays none,
    equal head counts stay equal, and a model that begins with dense layers keeps one.
    """
    small = type(config).from_dict(config.to_dict())
    vars(small).pop("quantization_config", None)
    for name, size in _SIZES.items():
        old = getattr(small, name, None)
        if isinstance(old, int) and old > 0:
            setattr(small, name, min(old, size) if name in _KEEP_IF_SMALLER else size)
    _shrink_attention_heads(small, config)
    _shrink_groups(small)
    _shrink_layers(small, config)
    _shrink_token_ids(small)
    small.max_position_embeddings = max(512, getattr(small, "max_position_embeddings", 0) or 0)
    return small


def _shrink_attention_heads(config: PretrainedConfig, original: PretrainedConfig) -> None:
    kv_heads = getattr(original, "num_key_value_heads", None)
    if kv_heads is not None and kv_heads > 1:
        config.num_key_value_heads = NUM_HEADS if kv_heads == original.num_attention_heads else NUM_HEADS // 2
    rotary = getattr(config, "qk_rope_head_dim", None)
    if rotary is None:
        return
    if hasattr(original, "qk_head_dim"):
        config.qk_head_dim = config.qk_nope_head_dim + rotary
    if getattr(original, "head_dim", None) == original.qk_rope_head_dim:
        config.head_dim = rotary


def _shrink_groups(config: PretrainedConfig) -> None:
    groups, kept = getattr(config, "n_group", None), getattr(config, "topk_group", None)
    if groups is None or groups <= 1:
        return
    config.n_group = NUM_GROUPS
    config.topk_group = NUM_GROUPS if kept == groups else TOPK_GROUP


def _shrink_layers(config: PretrainedConfig, original: PretrainedConfig) -> None:
    """Two layers of experts, after one dense layer where there are any; every kind that a per-layer list names."""
    depth = int(original.num_hidden_layers)
    dense_first = [name for name in _DENSE_FIRST if (getattr(original, name, None) or 0) > 0]
    for name in dense_first:
        setattr(config, name, 1)
    dense_listed = bool(getattr(original, "mlp_only_layers", None))
    if dense_listed:
        config.mlp_only_layers = [0]
    layers = 2 + bool(dense_first or dense_listed)
    layers = max(layers, 2 * (getattr(original, "decoder_sparse_step", 1) or 1))
    if (getattr(original, "moe_layer_end_index", None) or 0) > 0:
        config.moe_layer_end_index = layers - 1
    settings: dict[str, object] = vars(original)
    per_layer = [
        name
        for name, value in settings.items()
        if isinstance(value, list) and len(cast("list[object]", value)) == depth > 2
    ]
    if per_layer:
        rows = list(zip(*(getattr(original, name) for name in per_layer), strict=True))
        picked = sorted({str(row): index for index, row in reversed(list(enumerate(rows)))}.values())
        picked += [depth - 1] * (layers - len(picked))
        for name in per_layer:
            setattr(config, name, [getattr(original, name)[index] for index in picked])
        layers = len(picked)
    config.num_hidden_layers = min(depth, layers)
    for name in ("num_nextn_predict_layers", "max_window_layers"):
        if getattr(config, name, None):
            setattr(config, name, 0 if name == "num_nextn_predict_layers" else config.num_hidden_layers)


def _shrink_token_ids(config: PretrainedConfig) -> None:
    for index, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        value = getattr(config, name, None)
        if value is not None and (not isinstance(value, int) or value >= config.vocab_size):
            setattr(config, name, index)


def build(
    config: PretrainedConfig, seed: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """The stock model of `config` in evaluation mode with every parameter and persistent buffer random.

    A value depends on `seed`, the tensor's name and its shape alone: neither on the order of the modules nor on torch's
    global generator, which is left as it was. Matrices keep the scale of their input; norms, biases and buffers (a
    router's correction bias) move by 0.1 from their initial value, so that leaving one out of a computation shows.
    """
    with torch.random.fork_rng(devices=[]):
        # `torch.manual_seed` would seed the GPUs too, now or at their first use
        torch.default_generator.manual_seed(seed)
        model = cast("PreTrainedModel", AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    tensors: dict[str, torch.Tensor] = model.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                _randomise(tensor, name, seed)
    model.eval()
    nn.Module.to(model, device=device, dtype=dtype)
    return model


def _randomise(tensor: torch.Tensor, name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed * 0x1_0000_0001 + zlib.crc32(name.encode()))
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    if tensor.dim() < 2:
        tensor.add_(0.1 * noise)
    else:
        tensor.copy_(noise * tensor.shape[-1] ** -0.5)


def write(name: str, cache_dir: Path) -> Path:
    """The checkpoint folder of the twin `name` (bf16, shards, tokenizer) below `cache_dir`, made if it is not there.

    The folder's name carries a digest of this file and of the transformers version, so another recipe is another
    folder and no older compiled model loses its weights. Raises `InputRefused` for a name that is not in `names()`,
    `HostLacks` (H229) where the folder cannot be written.
    """
    if name not in _FAMILIES:
        raise InputRefused(
            Diagnostic(
                "I110",
                f"no small twin is called `{name}`",
                hint=f"write one of: {', '.join(f'tiny:{n}' for n in names())}",
            )
        )
    folder = cache_dir / f"{name}-{_recipe_digest()}"
    if folder.is_dir():
        return folder
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache_dir))
        try:
            _write_checkpoint(name, beside)
            beside.chmod(0o755)
            _move_into_place(beside, folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        message = f"the small twin cannot be written to `{cache_dir}`: {error.strerror or error}"
        hint = "give the cache another place with `KTC_CACHE_DIR`"
        raise HostLacks(Diagnostic("H229", message, hint=hint)) from error
    return folder


def _recipe_digest() -> str:
    from transformers import __version__

    return hashlib.sha256(Path(__file__).read_bytes() + __version__.encode()).hexdigest()[:10]


def _move_into_place(beside: Path, folder: Path) -> None:
    try:
        os.rename(beside, folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was first with the same content
            raise


def _write_checkpoint(name: str, folder: Path) -> None:
    tokenizer = _train_tokenizer()
    config = shrink(AutoConfig.for_model(name, **_FAMILIES[name]))
    config.vocab_size = len(tokenizer)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = (
        tokenizer.pad_token_id,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
    )
    model = build(config, seed=0, dtype=torch.bfloat16)
    model.generation_config.do_sample = False
    with _no_progress_bars():
        model.save_pretrained(folder, max_shard_size="250KB")
    tokenizer.save_pretrained(folder)


@contextmanager
def _no_progress_bars() -> Generator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


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
