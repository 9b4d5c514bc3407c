"""The explorer: a page on this machine where figures of a GPU are moved and the forecast follows (extra `explore`)."""
