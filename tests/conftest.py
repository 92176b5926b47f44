"""One thread for torch in every test: with two, passes of these small models wait for each other on busy cores.

Measured on two cores with another load beside: the same engine test takes 68 s with two threads and 3.5 s with one.
"""

import torch

torch.set_num_threads(1)
