"""`asyncfabric bench`: real processes, verified transfers, rows with the machine's limit of the same run."""
