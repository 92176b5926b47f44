"""Kernels of specrs, each with a reference in plain torch. Import as `specrs.kernels`. No scheduling, no models.

Kernels import only `specrs.core`, for constants, and `specrs.verify`, for the references that are there.
"""

if __name__ != "specrs.kernels":
    raise ImportError("import specrs.kernels, not kernels: the folder is part of the specrs package")
