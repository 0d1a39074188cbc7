"""`make learn`: a small MoE reads about an invented world, is compiled, tuned to two tasks and asked about others."""
