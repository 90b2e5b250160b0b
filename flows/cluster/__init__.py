"""A Dask cluster: the connection, the workers' side, and the distribution of a study's work."""
