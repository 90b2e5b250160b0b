"""Document sources, one module each; ``kvdrift.generator.documents.registry`` chooses from them."""
