"""Puna's own web pages over a store: plain HTML from the server, a little script, nothing fetched from elsewhere."""

from puna.flows.web.app import application

__all__ = ["application"]
