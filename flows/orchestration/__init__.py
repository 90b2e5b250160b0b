"""Prefect's part in a study: the server, and the tasks and the page of a flow run."""
