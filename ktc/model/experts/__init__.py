"""The routed experts of a layer: form, PyTorch reference, weight formats, LoRA, packed weights and kernels."""
