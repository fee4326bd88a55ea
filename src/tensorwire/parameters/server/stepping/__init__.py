"""Makes the versions of a store from the commits of all slices."""
