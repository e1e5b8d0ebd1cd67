"""`asyncfabric serve expert`: nodes that share the experts of one model, and who conducts them. See README.md."""
