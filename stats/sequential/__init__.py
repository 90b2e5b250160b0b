"""Group-sequential designs: looks at a study while it grows, with intervals that hold at all of them together."""
