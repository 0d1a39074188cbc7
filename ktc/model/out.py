"""The names that the Python files of an OUT folder import. They stay where the modules behind them move."""

from ktc.model.loading.compiled_model import CompiledModel
from ktc.model.loading.load import load
from ktc.model.loading.peft_glue import install, read_lora_config

__all__ = ["CompiledModel", "install", "load", "read_lora_config"]
