"""Units: their rows, their events, their derived rows, and the commits that make them visible."""
