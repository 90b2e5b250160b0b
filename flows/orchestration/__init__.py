"""Prefect as a study uses it: whose server, and what a run shows there."""
