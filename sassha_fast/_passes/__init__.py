"""The passes over parameters: what a step does to memory, on every backend with the same bits."""
