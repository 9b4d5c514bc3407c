"""Graphs of traced programs: JAX functions and torch modules."""
