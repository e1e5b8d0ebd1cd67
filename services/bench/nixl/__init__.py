"""`bench nixl`: our NIXL face, bare calls and the real NIXL on the same work."""
