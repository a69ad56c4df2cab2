"""``make matrix``: one wheel beside every torch and Python that users have.

``cells.py`` says what is tried, ``environment.py`` makes and removes the environments, ``run.py`` runs the tests and
keeps the results, ``page.py`` writes them into docs/install.md.
"""
