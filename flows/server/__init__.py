"""Reports of runs to a Prefect server, over HTTP, without importing Prefect."""
