"""Trains one worker's copy of a model: its parameters in a store, and the step."""
