"""Layouts: all ways to split a model over GPUs, forecast together and ranked."""
