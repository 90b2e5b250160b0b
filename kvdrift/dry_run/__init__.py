"""``kvdrift run --dry-run``: what a run would do, and what it needs of memory and time."""
