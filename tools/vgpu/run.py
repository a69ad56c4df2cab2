"""Runs a command on the virtual GPU, in a copy of the project: ``python tools/vgpu/run.py COMMAND...``.

The first call installs a torch with CUDA (some 5 GB, minutes) and builds everything under VGPU_HOME; later ones build
what changed. README.md lists the environment variables.
"""

import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the package vgpu, not its modules

from vgpu.environment import Environment  # noqa: E402


def main() -> None:
    """Prepares, and becomes the command."""
    command = sys.argv[1:]
    if not command or command[0] in ("-h", "--help"):
        sys.exit(f"{__doc__}\nusage: python tools/vgpu/run.py COMMAND...")
    environment = Environment.from_variables()
    environment.prepare()
    variables = environment.variables()
    os.chdir(environment.source)
    sys.stdout.flush()
    os.execvpe(command[0], command, variables)


if __name__ == "__main__":
    main()
