"""An extension of griffe, which reads the docstrings for the site: roles of reST become links and formulas."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|func|meth|mod):`([^`]+)`")
MATH = re.compile(r":math:`([^`]+)`")

# What docstrings refer to, by the names of the site. Other targets are internal and stay without a link.
TARGETS = {
    "check_model": "sassha_fast.check_model",
    "eigenpairs": "sassha_fast.sharpness.Sharpness.eigenpairs",
    "eval": "sassha_fast.MSASSHA.eval",
    "join_hook": "sassha_fast.SASSHA.join_hook",
    "read_log": "sassha_fast.log.read_log",
    "replayed": "sassha_fast.SASSHA.replayed",
    "sassha_fast.SASSHA": "sassha_fast.SASSHA",
    "sassha_fast.Stats": "sassha_fast.Stats",
    "sassha_fast.log": "sassha_fast.log.StatsLog",
    "sassha_fast.log.read_log": "sassha_fast.log.read_log",
    "sassha_fast.plots": "sassha_fast.plots.plot_curve",
    "sassha_fast.schedules": "sassha_fast.schedules",
    "sassha_fast.sharpness": "sassha_fast.sharpness.Sharpness",
    "sassha_fast.sharpness.Sharpness": "sassha_fast.sharpness.Sharpness",
    "SASSHA.attach": "sassha_fast.SASSHA.attach",
    "SASSHA.perturb_weights": "sassha_fast.SASSHA.perturb_weights",
    "SasshaMixin": "sassha_fast.integrations.huggingface.SasshaMixin",
    "Sharpness.curve": "sassha_fast.sharpness.Sharpness.curve",
    "Sharpness.spectral_density": "sassha_fast.sharpness.Sharpness.spectral_density",
    "Sharpness.surface": "sassha_fast.sharpness.Sharpness.surface",
    "step": "sassha_fast.SASSHA.step",
    "train": "sassha_fast.MSASSHA.train",
    "unperturb": "sassha_fast.SASSHA.unperturb",
}


class Docstrings(griffe.Extension):
    """Makes Markdown of the docstrings."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrites the docstring of everything that is loaded."""
        if obj.docstring is not None:
            text = ROLE.sub(lambda match: _link(match[1]), obj.docstring.value)
            text = MATH.sub(r"$\1$", text)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)


def _link(target: str) -> str:
    return f"[`{target}`][{TARGETS[target]}]" if target in TARGETS else f"`{target}`"
