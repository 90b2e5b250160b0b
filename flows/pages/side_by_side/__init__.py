"""Several stores side by side: which documents they share, and differences over these."""
