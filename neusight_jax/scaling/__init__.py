"""A run measured on one GPU, forecast on another: readers of traces, the rule each kernel is scaled by, and the sum."""
