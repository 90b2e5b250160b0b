"""Studies that a Prefect server starts: the flows of deployments, and the deployments."""
