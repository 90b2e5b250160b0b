"""The page's first screen: the recommended action, the ranked table, and bytes against divergence."""
