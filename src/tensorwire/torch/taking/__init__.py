"""Lets a worker compute the slices of others that were killed, or have left."""
