"""The page's first screen: which action can be recommended, the ranked table, and bytes against divergence."""
