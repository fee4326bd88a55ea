"""Adapts training loops of other libraries: a module each, imported when asked for.

`lightning` has a strategy, `accelerate` an Accelerator, `transformers` a Trainer. What they share
is in `adapter`. docs/integrations.md is the guide.
"""
