"""One decoding step of a compiled model: caches, native steps and CUDA graphs."""
