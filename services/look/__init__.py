"""`asyncfabric why`, `top`, `peers ls`, `mr ls`: looking at running nodes over their HTTP endpoints. See README.md."""
