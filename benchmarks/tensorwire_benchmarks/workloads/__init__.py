"""The models that the bench trains: whose tensors, bytes and order of gradients are real.

`catalog.py` lists them and imports no torch. The other modules hold a family each; `task.py` is
what they have in common. They know no system and move nothing.
"""
