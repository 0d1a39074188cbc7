"""Small causal LMs that nobody published, as model folders with code: each with a trap, and with a near-twin.

`families` has the blocks, `model` what they share, `zoo` the rows: the trap, the near-twin and the expected outcomes.
`written` writes a model folder, `compared` compiles it and compares it with the stock model.
"""
