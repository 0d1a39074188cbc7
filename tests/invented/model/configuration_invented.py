"""The config of every invented model; a family's own settings become attributes of the same names."""

from transformers import PretrainedConfig


class InventedConfig(PretrainedConfig):
    model_type = "invented"

    def __init__(
        self,
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        hidden_act="silu",
        rope_base=10000.0,
        norm_eps=1e-6,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.moe_intermediate_size = moe_intermediate_size
        self.hidden_act = hidden_act
        self.rope_base = rope_base
        self.norm_eps = norm_eps
        super().__init__(**kwargs)
