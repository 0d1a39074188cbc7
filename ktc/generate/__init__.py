"""Answers of a compiled model: prompts, batches, chat, an OpenAI-compatible server."""
