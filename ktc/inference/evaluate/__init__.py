"""`ktc eval`: metrics of generated answers and multiple choice, for the base and the tuned model."""
