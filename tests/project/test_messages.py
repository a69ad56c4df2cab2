"""The trouble-shooting page: made of the messages of the sources, each with an explanation, and nothing else."""

from __future__ import annotations

import pytest

from tools.errors import page
from tools.errors.messages import INTERNAL, REASON, ROOT, messages, messages_of

ADVICE = "say it in tools/errors/page.md and run `make errors` (or paste it into docs/errors.md, and --adopt)"


def test_every_message_of_the_sources_is_explained():
    explained = page.explained()
    missing = {m.key: m for m in messages() if m.text not in explained}.values()
    listed = "\n".join(f"  {m.file}:{m.line}: {m.kind}: {m.text}" for m in missing)
    assert not missing, f"{ADVICE}:\n{listed}"


def test_the_page_is_what_the_sources_say_now():
    assert page.PAGE.read_text(encoding="utf-8") == page.render(), ADVICE


def test_a_message_that_was_seen_is_named_by_words_and_values():
    line = page.name("ValueError", "SASSHA: lazy_hessian is 0, expected an integer of at least 1")
    kind, words = line.split(page.SEPARATOR)[0].split(": ", 1)
    assert kind == "ValueError"
    assert words in "expected an integer of at least"
    assert page.fill(line)[1] == "SASSHA: lazy_hessian is 0, expected an integer of at least 1"
    assert page.adopt() == page.TEMPLATE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ValueError: no source has these words", "none has 'no source has these words'"),
        ("ValueError: expected", r"\d+ have 'expected'"),
        ("ValueError: expected an integer of at least | SASSHA", "fills in 1 values, expected 4"),
    ],
)
def test_a_line_that_names_no_message_or_several_or_fills_it_wrongly_is_refused(line, words):
    with pytest.raises(page.PageError, match=words):
        page.fill(line)


def test_what_is_left_out_exists():
    found = {m.key for path in (ROOT / "sassha_fast").rglob("*.py") for m in messages_of(path)}
    assert INTERNAL.keys() <= found


def test_messages_are_read_from_the_sources(tmp_path):
    path = tmp_path / "backends.py"
    path.write_text(
        "def f(a):\n    raise ValueError(f'a is {a!r}, ' 'expected 1')\n"
        "def g():\n    warnings.warn('careful', stacklevel=2)\n"
        "def _x_why_not(d):\n    return None if d else f'no {d}'\n"
    )
    found = {(m.kind, m.text) for m in messages_of(path)}
    assert found == {("ValueError", "a is {}, expected 1"), ("UserWarning", "careful"), (REASON, "no {}")}
    error = next(m for m in messages_of(path) if m.kind == "ValueError")
    assert error.fits("ValueError", "a is 'b', expected 1")
    assert not error.fits("ValueError", "a is 'b', expected 2")
    assert not error.fits("TypeError", "a is 'b', expected 1")
