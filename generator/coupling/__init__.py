"""The maximal coupling of two next-token laws, and rollouts under it. Knows no model."""
