"""The maximal coupling of two next-token distributions, and rollouts under it; this package knows no models."""
