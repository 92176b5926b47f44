"""Kernels of specrs, each beside its plain-torch reference. Import as `specrs.kernels`. No scheduling, no models."""

if __name__ != "specrs.kernels":
    raise ImportError("import specrs.kernels, not kernels: the folder is part of the specrs package")
