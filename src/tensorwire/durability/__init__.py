"""Keeps what a member of a job has for the process that takes its place."""
