"""A model that several processes share: how it is cut into stages, and how they run in turn."""
