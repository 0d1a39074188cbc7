"""`ktc bench decode`: decoding and prefill of a compiled model beside stock Hugging Face and llama.cpp.

`request` makes a `Request` of what was asked, `model_file` writes a GGUF file of a real model's sizes with random
weights, `engines` and `llama` compute with it, `run` measures all of them in alternating rounds into a `Report`.
"""
