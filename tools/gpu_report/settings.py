"""What a report is about: the device, and how much is run on it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRIAL_TESTS = ("tests/kernels/test_philox.py",)


@dataclass(frozen=True)
class Settings:
    """How a report is made.

    Attributes:
        device: "cuda" or "cpu".
        name: The device's name.
        virtual: Whether the GPU is the virtual one of the tests.
        tests: Files and folders of tests to run; none for those that belong to the device.
        compiled: Whether training steps are tried with ``torch.compile``.
    """

    device: str
    name: str
    virtual: bool = False
    tests: tuple[str, ...] = ()
    compiled: bool = True

    @property
    def trial(self) -> bool:
        """Whether the run only shows that the report works: small shapes, and no figure of time means anything."""
        return self.virtual or self.device == "cpu"

    @property
    def backends(self) -> tuple[str, ...]:
        """Backends with kernels for the device."""
        return ("cpu",) if self.device == "cpu" else ("cuda", "triton")

    @property
    def chosen_tests(self) -> tuple[str, ...]:
        """The tests to run, with those of a trial filled in."""
        return self.tests or (TRIAL_TESTS if self.trial else ("tests",))

    def to_json(self) -> str:
        """For the command line of a part."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """What ``to_json`` has written."""
        read = json.loads(text)
        return cls(**{**read, "tests": tuple(read["tests"])})
