"""``python -m sassha_fast`` prints which backends run here, and with ``--memory N`` what N parameters take."""

import argparse

from . import memory
from .backends import report


def main() -> None:
    """Reads the arguments, and prints."""
    parser = argparse.ArgumentParser(prog="python -m sassha_fast", description="Which backends run here.")
    parser.add_argument(
        "--memory", metavar="N", help="print what a model of N parameters (125000000, 350M, 7B) takes to train instead"
    )
    args = parser.parse_args()
    if args.memory is None:
        print(report())
        return
    try:
        count = memory.count_of(args.memory)
    except ValueError as error:
        parser.error(str(error))
    print(memory.report(count))


if __name__ == "__main__":
    main()
