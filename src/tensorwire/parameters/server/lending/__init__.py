"""Lends versions, and memory, to readers that are no workers."""
