"""Units: their rows, their events, what is derived of them, and the commits that make them visible."""
