"""The section on answers: how many right answers divergence costs, and whether their records were kept."""
