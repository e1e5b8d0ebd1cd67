"""A receiver of weight updates: opens memory, checks, forwards, flips. Door: `asyncfabric.weights.update`."""
