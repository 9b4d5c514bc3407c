"""Graphs: a model and its workload as operators, and those as kernels."""

from neusight_jax.graph.architectures import ARCHITECTURES
from neusight_jax.graph.build import graph_from_config
from neusight_jax.graph.catalog import list_models, load_model_config
from neusight_jax.graph.graph import MODES, Graph, Node
from neusight_jax.graph.reference import DIFFERENCES, reference_kernels

__all__ = [
    "ARCHITECTURES",
    "DIFFERENCES",
    "MODES",
    "Graph",
    "Node",
    "graph_from_config",
    "list_models",
    "load_model_config",
    "reference_kernels",
]
