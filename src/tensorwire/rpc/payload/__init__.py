"""Moves the payload of messages: which way each takes, in which memory it lies, who frees that.

`outgoing` decides and encodes, `incoming` decodes; both use an `attachment`, which joins two ends.
Below them: `leases` and `inbox` (memory of the other end and of this one), `envelope` (pure).
"""
