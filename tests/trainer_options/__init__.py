"""Every option of the trainers, on a compiled model and on its stock model."""
