"""Benchmarks: each module prints times, and ratios to a peer measured in the same run; with ``--json`` as JSON."""
