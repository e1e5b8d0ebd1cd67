"""The coordinator of weight updates: participants, decision, durable log. Door: `asyncfabric.weights.update`."""
