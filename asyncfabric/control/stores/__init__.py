"""What directories of one cluster share: a key-value store, and in it a log of decisions that makes one table.

On the event loop's thread. `open_store` makes a store from its address; `SharedTable` is the log.
"""

from asyncfabric.control.stores.address import StoreAddress, open_store
from asyncfabric.control.stores.log import SharedTable
from asyncfabric.control.stores.memory import DirectoryStore, MemoryStore

__all__ = ["DirectoryStore", "MemoryStore", "SharedTable", "StoreAddress", "open_store"]
