"""The machine's own ceilings: bare loops in processes without a fabric."""
