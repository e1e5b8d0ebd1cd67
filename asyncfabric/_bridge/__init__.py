"""The lift between Python tasks and the engine: one protocol (`engine`), parked tasks (`stairwell`), errors (`faults`).

`native` is the only importer of the compiled module; `trio_landing` and `asyncio_landing` are the only files that know
an event loop by name. Nothing here decides policy: that is the business of the floors above.
"""
