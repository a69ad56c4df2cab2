"""One pass alone, raced by all who have it and by the machine's floor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
from floors import COPY_BYTES, floor_name, floor_of, floors
from measure import Measured, interleave, ratio, stopwatch
from settings import Settings
from shapes import Shapes, count

from sassha_fast import traffic

ROOFLINE, COPY, EAGER = "roofline", "copy", "eager loop"

Build = Callable[[Shapes], Callable[[], object]]


def bytes_of(name: str) -> int:
    """Bytes per float32 parameter: the reads and writes that the algorithm can't do without."""
    if name == "ordinary":
        return sum(map(traffic.bytes_per_parameter, traffic.METHODS["SASSHA"][0]))
    return 4 if name == "rademacher" else traffic.bytes_per_parameter(name)


@dataclass(frozen=True)
class Race:
    """One pass on the shapes of one model, by contender."""

    name: str
    model: str
    shapes: Shapes
    measured: Mapping[str, Measured]

    def tell(
        self, contender: str, record: Callable[..., None], say: Callable[[str], None], note: str = "", **more: object
    ) -> None:
        """Records one contender and says a line about it. The main ratio is to the floor, else to the eager loop."""
        mine = self.measured.get(floor_name(self.name) if contender == ROOFLINE else contender)
        if mine is None:
            pytest.skip(f"{contender} does not run {self.name} on {self.model} here")
        size = COPY_BYTES if contender == COPY else bytes_of(self.name)
        speed = size * count(self.shapes) / mine.median / 1e9
        line = f"{self.model:<8} {self.name:<12} {contender:<16} {mine.median * 1e3:8.3f} ms {speed:6.1f} GB/s"
        main = None
        if EAGER in self.measured and contender != COPY:
            main = ("speedup_over_eager", ratio(self.measured[EAGER], mine))
            more["speedup_over_eager"] = main[1].median
            line += f"  {main[1]} the eager loop's speed"
        floor = floor_of(self.name, self.measured, size) if contender != COPY else None
        if floor is not None:
            main = ("share_of_roofline", ratio(floor, mine))
            line += f"  {main[1]} the roofline's speed"
        record(
            mine,
            contender,
            main=main,
            model=self.model,
            parameters=count(self.shapes),
            tensors=len(self.shapes),
            bytes_per_parameter=size,
            gigabytes_per_second=speed,
            **{"pass": self.name},
            **more,
        )
        say(line + note)


def race(name: str, model: str, settings: Settings, contenders: Mapping[str, Build], rounds: int) -> Race:
    """Lets the contenders and the floor take turns."""
    shapes = settings.shapes(model)
    runs = {contender: stopwatch(build(shapes)) for contender, build in contenders.items()}
    return Race(name, model, shapes, interleave({**runs, **floors(shapes, name)}, settings.rounds(rounds)))
