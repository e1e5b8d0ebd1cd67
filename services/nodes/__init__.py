"""The nodes of a serving cluster, one process each: directory, prefill, decode and router. See README.md."""
