"""The engine ``transformers``: presses of kvpress, caches and patches as they are, around transformers' own models."""
