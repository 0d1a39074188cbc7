"""Single experts that a GPU keeps: which ones, how a call is divided, and their products for few tokens."""
