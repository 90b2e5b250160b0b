"""``kvdrift run --dry-run``: the work of a run, and the memory and time that it needs."""
