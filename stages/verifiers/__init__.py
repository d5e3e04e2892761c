"""Verifiers, which score the answers to a prompt: one file each; `registry` names them, `scoring` runs them."""
