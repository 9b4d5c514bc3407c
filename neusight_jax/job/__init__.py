"""Whole jobs on many GPUs: how a model is split, who sits where, in which order stages run, and what a step costs."""
