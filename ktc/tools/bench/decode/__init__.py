"""`ktc bench decode`: decoding and prefill of a compiled model beside stock Hugging Face and llama.cpp.

`model_file` writes a GGUF file of a real model's sizes with random weights, `engines` compute with it, and `run`
measures all of them in alternating rounds.
"""
