"""The section on answers: what divergence does to right ones, and what became of their records."""
