"""The device: whether there is one, which it is, and what a process needs before it uses it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import dataclass

from .settings import ROOT, Settings

VIRTUAL = "Virtual A100"  # the name of the virtual GPU (tools/vgpu)
PATIENCE = 300  # seconds
# Printed by a process of its own, so that the one that writes the page takes no memory of the GPU.
PROBE = """
import json, torch
there = torch.cuda.is_available()
print(json.dumps({
    "name": torch.cuda.get_device_name(0) if there else None,
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
}))
"""


@dataclass(frozen=True)
class Found:
    """What torch says about the machine."""

    name: str | None
    torch: str
    cuda: str | None

    @property
    def virtual(self) -> bool:
        """Whether the GPU is the virtual one of the tests."""
        return self.name == VIRTUAL

    @property
    def reason(self) -> str:
        """Why there is no report, in a sentence."""
        if self.cuda is None:
            # The name of the build has to be given: pip takes 2.13.0+cpu for 2.13.0.
            remedy = f"is a build without CUDA; `pip install torch=={self.torch.partition('+')[0]}+cu130 "
            remedy += "--index-url https://download.pytorch.org/whl/cu130` installs one with it"
        else:
            remedy = f"has CUDA {self.cuda} but finds no GPU; `nvidia-smi` says whether the driver does"
        return f"there is no GPU to report on: torch {self.torch} {remedy}, or try the report with --device cpu"


def find() -> Found:
    """Asks torch in a process of its own."""
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode != 0:
        raise RuntimeError(f"torch could not be asked for a GPU:\n{done.stderr}")
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def prepare(settings: Settings) -> None:
    """Makes this process ready: tensors are made on the device, and the benchmarks' modules can be imported.

    They list the backends of the default device as they are imported, so they are imported after this.
    """
    import torch

    if settings.virtual:
        importlib.import_module("vgpu.operators").install()  # torch's own operators, before anything else
        # It runs torch's operators by those of the CPU, which has none of these.
        for enable in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"):
            getattr(torch.backends.cuda, enable)(False)
    sys.path.insert(0, str(ROOT / "bench"))
    torch.set_default_device(settings.device)


def virtual_counters() -> dict[str, int]:
    """What the virtual GPU has counted so far, by its own names."""
    return dict(importlib.import_module("vgpu").counters())


def pytest_options(settings: Settings) -> list[str]:
    """What pytest needs to run on the device."""
    return ["--device", settings.device, *(["-p", "vgpu.plugin"] if settings.virtual else [])]
