"""The configuration of node services: file < environment < flags, each value with its origin. See README.md."""
