"""Parameters of a layer's experts that train: LoRA, its factors on the host, PEFT's wrapper, and trained weights."""
