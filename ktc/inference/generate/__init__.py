"""Text generation with a compiled model: prompts, batches, chat, an OpenAI-compatible server."""
