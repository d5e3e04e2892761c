"""Tensor operations: a reference, a CPU and a Triton version of each, behind one function."""
