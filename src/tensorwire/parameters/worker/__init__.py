"""A worker's side of a store."""
