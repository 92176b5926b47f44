"""How a launch executes on a CUDA device: persistent buffers, capturable functions, graphs. Plans nothing."""
