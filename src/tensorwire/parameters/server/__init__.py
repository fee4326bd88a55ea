"""Implements a server's side of a store."""
