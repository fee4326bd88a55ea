"""The models that the bench trains, with real tensors, bytes and order of gradients.

`catalog.py` lists them and imports no torch. The other modules have a family of models each;
`task.py` is their common base. They know no system and move nothing.
"""
