"""Document sources, one module each; ``generator.sources`` chooses from them."""
