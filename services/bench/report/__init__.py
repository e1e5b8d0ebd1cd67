"""Where rows of a bench go: a table for people, JSON lines, a picture."""
