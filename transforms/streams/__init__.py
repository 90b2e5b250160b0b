"""Events that arrive as a stream: Beam transforms that assemble replicates, derive them, and read and write a store."""
