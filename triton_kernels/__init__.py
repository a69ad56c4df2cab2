"""The Triton kernels, installed as ``sassha_fast.triton_kernels``.

``math`` and ``philox`` are twins of ``csrc/math.h`` and ``csrc/philox.h``: the same functions with the same operations
in the same order. ``access`` finds a program's piece of the pointer table and reads and writes it. The passes have a
file each: ``norm``, ``perturb``, ``gap``, ``probe`` and ``step``. ``sassha_fast.triton_passes`` launches them.
"""
