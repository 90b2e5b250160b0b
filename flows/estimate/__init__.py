"""The estimates of a stored study, from its views to stored rows, the scores of its answers, and the gate."""
