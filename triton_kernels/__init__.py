"""Room of the Triton kernels, installed as ``sassha_fast.triton_kernels``. This release has none yet."""
