"""A compiled model behind OpenAI's API: one engine that computes many requests in running batches."""
