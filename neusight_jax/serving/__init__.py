"""Serving: how many of which GPU answer so many requests in time, and what that costs."""
