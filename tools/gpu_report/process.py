"""The process of one part: ``python -m tools.gpu_report.process MODULE SETTINGS OUT [OPTION=VALUE ...]``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from .result import Failure, Result
from .settings import Settings


def main(module: str, settings: str, out: str, *options: str) -> None:
    """Runs a part and stores what it found, which is the exception if it raises one."""
    try:
        run = importlib.import_module(module).run
        result = run(Settings.from_json(settings), **dict(option.split("=", 1) for option in options))
    except Exception as error:
        result = Result(failures=[Failure.of(module.rpartition(".")[2], error)])
    result.write(Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
