"""The maximal coupling of two next-token laws, and rollouts under it; nothing here knows a model."""
