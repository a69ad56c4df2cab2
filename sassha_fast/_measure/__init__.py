"""What the tools that measure a minimum are made of. The optimizers do not use it."""
