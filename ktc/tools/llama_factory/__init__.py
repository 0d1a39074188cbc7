"""LLaMA-Factory as a front end of compiled models."""
