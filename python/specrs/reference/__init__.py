"""A slow implementation of a step by torch, which tests compare others with. Production imports none of it."""
