"""Adapters that run specrs inside other software. Each host has a module; importing this package imports none of
them."""
