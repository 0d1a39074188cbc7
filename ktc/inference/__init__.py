"""What a compiled model is used for without training: generate, serve, quantize, evaluate, and compare with stock."""
