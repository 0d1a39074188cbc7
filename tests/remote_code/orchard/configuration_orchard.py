"""The config of Orchard, a small mixture-of-experts model that transformers does not know."""

from transformers import PretrainedConfig


class OrchardConfig(PretrainedConfig):
    model_type = "orchard"

    def __init__(
        self,
        vocab_size=256,
        hidden_size=64,
        trees=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pickers=8,
        pickers_per_token=2,
        picker_width=48,
        rope_base=10000.0,
        norm_eps=1e-6,
        loop="range",
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.trees = trees
        self.num_hidden_layers = trees
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.pickers = pickers
        self.pickers_per_token = pickers_per_token
        self.picker_width = picker_width
        self.rope_base = rope_base
        self.norm_eps = norm_eps
        self.loop = loop
        super().__init__(**kwargs)
