"""Benchmarks: each module prints times and their ratios to a peer, all measured in one run, or with ``--json`` JSON."""
