"""Programs that people run: the `asyncfabric` command and its groups, one folder each.

Installed as `asyncfabric_services`.
"""
