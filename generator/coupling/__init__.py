"""The maximal coupling of two next-token laws, and rollouts under it; this package knows no models."""
