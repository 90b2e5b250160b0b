"""Benchmarks: each module prints ratios measured in one run against a peer; ``--json`` prints an object."""
