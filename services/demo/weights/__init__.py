"""`asyncfabric demo weights`: replicas serve the weights of a training; one is killed, one joins late."""
