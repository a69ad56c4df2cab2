"""What is tried: versions of torch, Python and frameworks, and the tests that each of them runs."""

from __future__ import annotations

from dataclasses import dataclass

# Newest first: users have these, and a defect shows early.
TORCHES = ("2.15.0", "2.10.0", "2.14.1", "2.12.1")
PYTHONS = ("3.12", "3.13", "3.10")
MISSING = {("2.15.0", "3.10")}  # there is no such build of torch
TESTED = "2.13.0"  # what `make test` has
# What torch can change: loops, closures, checkpoints, autocast, products, schedulers, hooks, bits of all backends, and
# the library's own loading. The passes one by one, with thousands of cases, are left to `make test`.
PORTABLE = tuple(
    f"tests/{path}.py"
    for path in (
        "kernels/test_library",
        "kernels/test_backends",
        "kernels/test_philox",
        "kernels/test_parity",
        "optimizer/test_loop",
        "optimizer/test_closure",
        "optimizer/test_products",
        "optimizer/test_amp",
        "optimizer/test_checkpoint",
        "optimizer/test_old_checkpoint",
        "optimizer/test_torch_habits",
        "optimizer/test_torch_tools",
        "optimizer/test_compile",
        "optimizer/test_capturable",
        "optimizer/test_momentum_checkpoint",
    )
)
# Triton before 3.9 interprets kernels with numpy up to 2.3.
NEEDS = ("numpy<2.4", "pytest", "scipy", "tqdm", "matplotlib", "scikit-learn", "pytorch_optimizer==4.1.0")
TRAINERS = ("tests/integrations/test_lightning.py", "tests/integrations/test_huggingface.py")
TRAINERS += ("tests/integrations/test_accelerate.py",)


@dataclass(frozen=True)
class Cell:
    """One environment.

    Attributes:
        torch: Version of torch, as the registry has it: a build with CUDA.
        python: Version of Python.
        frameworks: Requirements of Lightning, transformers and Accelerate; nothing leaves them out.
    """

    torch: str
    python: str
    frameworks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its key in the results."""
        return " ".join([f"torch {self.torch}", f"Python {self.python}", *self.frameworks])

    @property
    def needs(self) -> tuple[str, ...]:
        """What is installed beside torch and the wheel."""
        return (*NEEDS, *self.frameworks)

    @property
    def tests(self) -> tuple[str, ...]:
        """Arguments of pytest that choose the tests; what compiles or trains for minutes is left to `make test`."""
        return TRAINERS if self.frameworks else (*PORTABLE, "-k", "not inductor and not thousand_rounds")


def all_cells() -> list[Cell]:
    """The table of torch and Python, then the oldest and the newest frameworks that pyproject.toml allows."""
    table = [Cell(t, p) for t in TORCHES for p in PYTHONS if (t, p) not in MISSING]
    oldest = ("lightning==2.6.0", "transformers==5.22.0", "accelerate==1.15.0")
    newest = ("lightning", "transformers", "accelerate")
    return [*table, Cell(TESTED, "3.11", oldest), Cell(TESTED, "3.11", newest)]
