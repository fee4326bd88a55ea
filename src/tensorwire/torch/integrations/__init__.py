"""Adapts training loops of other libraries: a module each, imported when asked for.

`lightning` has a strategy, `accelerate` an Accelerator, `transformers` a Trainer; `adapter` is
their common part. docs/integrations.md is the guide.
"""
