"""tensorwire without its analysis of the model: every gradient is copied to where it leaves from.

The same transport, the same server: what placement gains is the difference to `own`.
"""

from __future__ import annotations

from tensorwire_benchmarks.systems.own import OwnTrainer


class CopyTrainer(OwnTrainer):
    """One worker."""

    placement = "copy"


trainer = CopyTrainer
