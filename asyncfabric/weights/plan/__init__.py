"""The plan of an update: pure values and how they are made; no fabric, no torch. The door is `asyncfabric.weights`."""
