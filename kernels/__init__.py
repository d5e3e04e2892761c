"""Tensor operations: each is one function, with a reference, a CPU and a Triton implementation."""
