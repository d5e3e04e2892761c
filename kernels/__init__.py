"""Tensor operations, most with a reference, a CPU and a Triton implementation; and loops over text on CPUs."""
