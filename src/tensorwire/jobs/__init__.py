"""Finds the jobs of this user on this host, and talks to their processes; knows no member."""
