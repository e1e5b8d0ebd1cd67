"""What a node tells about itself: its state, its metrics and its log. Each part is usable without the others."""
