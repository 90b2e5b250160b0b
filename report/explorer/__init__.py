"""The trajectory explorer: trajectories as text on one page beside the report."""
