"""Implements a worker's side of a store."""
