"""HTTP modules without Prefect: reports of runs to a Prefect server, and checks of each request to Puna's own servers."""
