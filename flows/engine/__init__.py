"""The engine of flows: it declares, traces, plans and performs them."""
