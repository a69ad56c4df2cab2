"""``csrc/formats.h`` compiled for the tests, with the names of ``sassha_fast.formats``."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "csrc"


class Twin:
    """The functions of the kernels over flat tensors of whole groups."""

    def __init__(self, folder: Path) -> None:
        library = folder / "formats_twin.so"
        flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-shared", f"-I{SOURCES}"]
        subprocess.run(["g++", *flags, str(HERE / "formats_twin.cpp"), "-o", str(library)], check=True)
        self.library = ctypes.CDLL(str(library))

    def _call(self, name: str, *arguments: int | Tensor) -> None:
        first = next(a for a in arguments if isinstance(a, Tensor))
        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_int(a) for a in arguments]
        getattr(self.library, name)(ctypes.c_int64(first.numel()), *values)

    def encode_weight(self, x: Tensor, dtype: torch.dtype, bits: int) -> tuple[Tensor, Tensor]:
        p, r = torch.empty(x.shape, dtype=dtype), torch.empty(x.shape, dtype=torch.int16)
        self._call("encode_weights", int(dtype == torch.float16), bits, x, p, r)
        return p, r.to(torch.int8) if bits == 8 else r

    def weight_of(self, p: Tensor, correction: Tensor) -> Tensor:
        x, bits = torch.empty(p.shape), 8 * correction.element_size()
        r = correction.to(torch.int16)
        self._call("decode_weights", int(p.dtype == torch.float16), bits, p, r, x)
        return x

    def encode_momentum(self, values: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = torch.empty(values.shape, dtype=torch.int8), torch.empty(values.numel() // 32)
        self._call("encode_momenta", values, noise, codes, scales)
        return codes, scales

    def momentum_of(self, codes: Tensor, scales: Tensor) -> Tensor:
        values = torch.empty(codes.shape)
        self._call("decode_momenta", codes, scales, values)
        return values

    def encode_curvature(self, values: Tensor, noise: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
        codes = torch.empty(values.shape, dtype=torch.int8 if signed else torch.uint8)
        scales = torch.empty(values.numel() // 32, dtype=torch.bfloat16)
        self._call("encode_curvatures", 127 if signed else 255, values, noise, codes, scales)
        return codes, scales

    def curvature_of(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        values = torch.empty(codes.shape)
        self._call("decode_curvatures", 127 if signed else 255, codes, scales, values)
        return values

    def encode16(self, values: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        m, d = (torch.empty(values.shape, dtype=torch.bfloat16) for _ in range(2))
        self._call("encode16", values, noise, m, d)
        return m, d
