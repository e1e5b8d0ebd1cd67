"""Ray runs the nodes of a cluster: one actor for each, in one placement group. See the module `launcher`."""
