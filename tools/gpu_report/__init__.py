"""``make gpu-report``: what this package does on the GPU of this machine, on one page in Markdown."""
