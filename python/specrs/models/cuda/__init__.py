"""What passes on a CUDA device are made of: buffers, products, the residual stream."""
