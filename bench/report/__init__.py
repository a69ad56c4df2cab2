"""``python -m bench.report``: the benchmarks' JSON as one page of tables and plots."""
