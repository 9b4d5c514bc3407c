"""Kernels: families (dims, FLOP, bytes, tiles) and the tables the one function takes."""
