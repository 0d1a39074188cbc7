"""Kernels of a GPU for experts, by Triton and torch.compile, and the values that they read."""
