"""The Triton kernels, installed as ``sassha_fast.triton_kernels``.

``math``, ``philox`` and ``formats`` are twins of ``csrc/math.h``, ``csrc/philox.h`` and ``csrc/formats.h``: the same
functions with the same operations in the same order. ``access`` finds a program's piece of the pointer table and reads
and writes it, and ``stored`` what of it is stored in fewer bits. The passes have a file each: ``norm``, ``perturb``,
``gap``, ``probe``, ``unseen`` and ``step``. ``sassha_fast._passes.triton`` launches them.
"""
