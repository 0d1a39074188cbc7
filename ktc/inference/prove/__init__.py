"""`ktc prove`: a compiled model with its real weights, layer by layer beside the stock model in fp32.

Nothing here knows a stage of the compiler: OUT and its checkpoint are all that is read.
"""
