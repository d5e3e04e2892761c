"""Verifiers: how the answers to a prompt are scored. One file each; `registry` names them, `scoring` runs them."""
