"""The forecast of kernels: physics, heads, networks, intervals, and the checkpoints that hold them."""
