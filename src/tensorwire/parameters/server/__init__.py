"""A server's side of a store."""
