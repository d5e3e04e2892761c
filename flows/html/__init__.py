"""Markup, plots and layout for the report and the web pages."""
