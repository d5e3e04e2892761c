"""CPU code for numba's loops: vectors, matrix products, and a cache of compiled loops."""
