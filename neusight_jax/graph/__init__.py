"""Graphs: a model and its workload as operators, and those as kernels."""
