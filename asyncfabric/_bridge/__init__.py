"""The data path between tasks and the engine: a protocol (`engine`), parked tasks (`dispatcher`), errors (`faults`).

`native` is the only importer of the compiled module; `trio_adapter` and `asyncio_adapter` are the only files that know
an event loop by name. Nothing here decides policy: that is the business of the layers above.
"""
