"""``python -m sassha_fast`` prints which backends run here."""

from .backends import report

if __name__ == "__main__":
    print(report())
