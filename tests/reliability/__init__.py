"""Commands of ktc whose writes fail, or which die at one of them: `faults.py` injects, `commands.py` lists them."""
