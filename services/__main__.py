"""`python -m asyncfabric_services` is the `asyncfabric` command."""

from asyncfabric_services.cli import main

main()
