"""Backends: one folder for each kind of device that computes steps, and the modules that both use."""
