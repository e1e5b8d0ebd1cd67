"""A replica that generates from fused memory while the next version of the weights arrives. See README.md."""
