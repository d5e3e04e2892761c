"""Verifiers, which score the answers to a prompt: `registry` lists them, `scoring` runs them."""
