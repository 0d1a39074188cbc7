"""Definitions in plain PyTorch that kernels are compared with: experts, formats, and the split of a step."""
