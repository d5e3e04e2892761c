"""HTTP without importing Prefect: reports of runs to its server, and the checks of every request to ours."""
