"""Kernels of specrs, each beside its plain-torch reference. Import as `specrs.kernels`. No scheduling, no models.

Of the package they import `specrs.core`, for constants, and `specrs.verify`, for the references that live there, and
nothing else.
"""

if __name__ != "specrs.kernels":
    raise ImportError("import specrs.kernels, not kernels: the folder is part of the specrs package")
