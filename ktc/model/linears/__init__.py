"""Linear layers that take LoRA and, on the CPU, a kernel for few rows."""
