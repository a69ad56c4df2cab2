"""What the command line asks of the benchmarks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import shapes

QUICK_ROUNDS = 1


@dataclass(frozen=True)
class Settings:
    """How much to run.

    Attributes:
        quick: As little as shows that everything runs.
    """

    quick: bool

    def rounds(self, wanted: int) -> int:
        return min(wanted, QUICK_ROUNDS) if self.quick else wanted

    def shapes(self, model: str) -> shapes.Shapes:
        return (shapes.QUICK if self.quick else shapes.MODELS)[model]()

    def sizes(self, wanted: Iterable[int], most: int) -> list[int]:
        """Those of ``wanted`` to run: all, or up to ``most``."""
        return [size for size in wanted if size <= most or not self.quick]


def slug(name: object) -> str:
    """A contender's name in the id of a test, where a space would be in the way of ``-k``."""
    return str(name).replace(", ", "_").replace(" ", "_")
