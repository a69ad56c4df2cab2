"""A model of what SASSHA sends between GPUs, and how long that takes: ``python -m tools.scale``.

Nothing here was measured. Bytes and numbers of collectives are those that tests/parallel/test_distributed.py counts;
times follow from the bandwidth and latency given below. Written into docs/scale.md by ``make scale``.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "scale.md"
BEGIN, END = "<!-- scale: begin -->", "<!-- scale: end -->"

PARAMETERS = 1.5e9  # a GPT-2 XL
TENSORS = 580
INTERVAL = 10  # steps from one refresh to the next
BUCKET = 25 * 2**20  # bytes of a message
NODE = 8  # GPUs that NVLink connects
INSIDE, BETWEEN = 450e9, 50e9  # bytes a second and GPU: NVLink of an H100, one 400 Gbit/s adapter
LATENCY = 5e-6  # seconds for each level of a tree


@dataclass(frozen=True)
class Traffic:
    """What one step sends per parameter in units of float32 tensors, averaged over refreshes, in how many collectives.

    Attributes:
        reduced: All-reduced: each byte crosses the wire twice.
        scattered: Gathered or reduce-scattered: once.
        collectives: Messages of all kinds.
    """

    reduced: float
    scattered: float
    collectives: float


def buckets(tensors: float) -> float:
    return math.ceil(tensors * PARAMETERS * 4 / BUCKET)


def methods() -> dict[str, Traffic]:
    share = 1 / INTERVAL
    return {
        "AdamW, DDP": Traffic(1, 0, buckets(1)),
        "authors' SASSHA": Traffic(2, 0, 2 * TENSORS),
        "SASSHA, local ascent": Traffic(1 + share, 0, buckets(1) + share * buckets(1) + 1),
        "SASSHA, global ascent": Traffic(2 + share, 0, 2 * buckets(1) + share * buckets(1) + 2),
        "M-SASSHA": Traffic(1 + share, 0, buckets(1) + share * buckets(1) + 1),
        # Forward and backward gather the weights, backward scatters the gradients: SASSHA's in two passes and a tenth.
        "AdamW, FSDP2": Traffic(0, 3, 3 * 50),
        "SASSHA, FSDP2": Traffic(0, 3 * (2 + share), 3 * 50 * (2 + share) + 1),
        "M-SASSHA, FSDP2": Traffic(0, 3 * (1 + share), 3 * 50 * (1 + share) + 1),
    }


def seconds(traffic: Traffic, gpus: int) -> float:
    """Time on the wire, were nothing hidden behind computation."""
    bandwidth = INSIDE if gpus <= NODE else BETWEEN
    size = PARAMETERS * 4 * (gpus - 1) / gpus
    wire = (2 * traffic.reduced + traffic.scattered) * size / bandwidth
    return wire + traffic.collectives * 2 * math.ceil(math.log2(gpus)) * LATENCY


def table() -> str:
    lines = [
        "| method | bytes a parameter | collectives | 8 GPUs | 64 GPUs | 1,024 GPUs |",
        "|---|---|---|---|---|---|",
    ]
    for name, traffic in methods().items():
        sent = 4 * (2 * traffic.reduced + traffic.scattered)
        times = " | ".join(f"{seconds(traffic, gpus) * 1e3:,.0f} ms" for gpus in (8, 64, 1024))
        lines.append(f"| {name} | {sent:.1f} | {traffic.collectives:,.0f} | {times} |")
    return "\n".join(lines)


def main() -> None:
    argparse.ArgumentParser(prog="python -m tools.scale", description=__doc__.splitlines()[0]).parse_args()
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")
    print(table())


if __name__ == "__main__":
    main()
