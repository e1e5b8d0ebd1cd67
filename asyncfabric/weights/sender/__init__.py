"""A trainer of weight updates: proposes a version, converts, writes, reports. Door: `asyncfabric.weights.update`."""
