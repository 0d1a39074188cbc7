"""`ktc bench finetune`: optimizer steps of LoRA at a model's real sizes, with random weights or its own."""
