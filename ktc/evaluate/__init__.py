"""`ktc eval`: metrics of generated answers and multiple choice, base beside tuned."""
