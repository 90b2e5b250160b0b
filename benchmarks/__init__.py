"""Benchmarks: each module prints ratios measured in that run against the peer it names; ``--json`` prints an object."""
