"""`asyncfabric doctor`: can this machine do it, and what to change. One room per group of checks. See README.md."""
