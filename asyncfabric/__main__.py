"""`python -m asyncfabric` is the `asyncfabric` command, found by name: the library imports no program."""

import runpy

runpy.run_module("asyncfabric_services", run_name="__main__", alter_sys=True)
