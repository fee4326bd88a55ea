"""Knows the members of a job and how they reach each other; no parameters and no torch."""
