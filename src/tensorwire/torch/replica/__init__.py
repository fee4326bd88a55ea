"""One worker's copy of a model while it trains: its parameters in a store, and the step."""
