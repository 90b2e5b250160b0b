"""Whether a store is sound: everything in it read and held against the log, its own names and what it was made from."""
