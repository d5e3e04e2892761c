"""Tensor operations. An operation is one function, backed by a reference, a CPU and a Triton version."""
