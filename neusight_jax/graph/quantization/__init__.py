"""Quantized weights: how configs say that weights are stored, module by module."""
