"""Starts the program ddp-train; it has no Python interface."""
