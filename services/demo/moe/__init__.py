"""`asyncfabric demo moe`: four processes share the experts of a model and lose one of them. See README.md."""
