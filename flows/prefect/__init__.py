"""The one folder that imports Prefect."""
