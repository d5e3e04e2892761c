"""The integration with Prefect: forms, deployments and tasks."""
