"""LoRA adapters as files: reading, layouts of other tools, export, merging."""
