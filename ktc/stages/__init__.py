"""The stages of `ktc.compiler` in its order: capture, match, plan, rewrite, proof, codegen, link; and pictures."""
