"""Models from Hugging Face configs: readers of configs, and the kernels their layers launch."""
