"""A training loop of a causal model over several ranks, whose weights others serve. See README.md."""
