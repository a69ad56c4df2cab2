"""``make errors``: docs/errors.md from the messages of the sources and the explanations in page.md.

``messages.py`` reads the sources; ``page.py`` puts messages into the blocks of page.md. A line there names a message by
its kind and by words that no other has, and says what is filled in (∅ is nothing)::

    ValueError: expected an integer of at least | SASSHA | lazy_hessian | 0 | 1

``python -m tools.errors --adopt`` goes the other way: who has pasted a message, as it was seen, into docs/errors.md
gets page.md written from it.
"""
