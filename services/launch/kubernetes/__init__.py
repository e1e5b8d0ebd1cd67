"""A cluster file as objects of Kubernetes, printed and not applied. See README.md."""
