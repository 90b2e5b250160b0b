"""The display, pages and upkeep of a study that is still running."""
