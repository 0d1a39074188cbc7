"""Code that depends on Hugging Face's names: tensor renames, model code of a checkpoint folder, tokenizers."""
