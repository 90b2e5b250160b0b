"""Prefect's part in a study: the server, and the page of a flow run."""
