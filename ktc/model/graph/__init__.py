"""The contract of ktc's graphs over `torch.fx`: operators, shapes, verification, folding."""
