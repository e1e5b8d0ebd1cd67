"""`asyncfabric keys`: the key files of nodes that talk over TCP, and whom they trust."""
