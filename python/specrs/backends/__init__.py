"""Backends: one folder for each kind of device that computes steps (`cpu`, `cuda`), and the modules that both backends
use."""
