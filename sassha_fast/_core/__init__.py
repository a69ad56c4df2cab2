"""One step, from the gradients of a backward pass to the next weights."""
