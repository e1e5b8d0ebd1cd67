"""A cluster from one file: `asyncfabric up cluster.toml` on whatever starts processes here. See README.md."""
