"""SASSHA in training frameworks. Each module needs its framework; ``import sassha_fast`` imports none of them."""
