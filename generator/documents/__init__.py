"""Document sources, one module each; ``generator.documents.registry`` chooses from them."""
