"""The modules that import Prefect: forms, deployments and tasks."""
