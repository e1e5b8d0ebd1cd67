"""`asyncfabric plan`: what an update of weights would take on a cluster that nobody here owns."""
