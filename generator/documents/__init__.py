"""Document sources, one module each; ``kvdrift.generator.documents.registry`` has all of them by name."""
