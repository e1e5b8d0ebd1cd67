"""What a node reports about itself: its state, its metrics and its log. Each part is usable without the others."""
