"""Splits a model over processes: cuts it into stages and runs them in turn."""
