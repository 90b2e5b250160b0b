"""Other engines as generators: what an adapter fills, and what kvdrift makes of it."""
