"""Machines: GPUs, clusters, their files, variants and prices. Knows no software."""
