"""Moves the payload of messages: by which way, in which memory, and by which end that is freed.

`outgoing` decides and encodes, `incoming` decodes; both use an `attachment`, which joins two ends.
Below them: `leases` and `inbox` (memory of the other end and of this one), `envelope` (pure).
"""
