"""Produces gradients where they are read: slots, and the allocator of torch that fills them."""
