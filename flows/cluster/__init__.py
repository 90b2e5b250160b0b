"""A Dask cluster: how it is reached, what its workers run, and how a study's work is handed to them."""
