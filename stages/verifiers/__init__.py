"""Verifiers, which score the answers to a prompt: `registry` names them, `scoring` runs them."""
