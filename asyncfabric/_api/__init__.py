"""What a user holds: Fabric, Region, RegionKey, Transfer, ImmCounter, Peer. Imported through `asyncfabric` itself.

Everything runs on the event loop's thread unless its docstring states otherwise (ImmCounter.spin, WatchWord.store). No
file here knows a provider or a compiled module; engines are reached through `asyncfabric._bridge` only.
"""
