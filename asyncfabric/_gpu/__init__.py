"""The one binding to CUDA's driver from Python: libcuda by ctypes, opened when somebody needs it. A door; no logic.

`driver` opens the library and names its errors; `module` loads and launches kernels; `memory` maps GPU memory that
processes share, and holds the driver's numbers and structs. Streams and events are torch's. No policy, no torch; a
piece for every layer above.

By ctypes, not by NVIDIA's cuda-bindings: on an H100 a launch costs 7.2 us here, 6.9 us there and 9.0 us through torch,
and a dependency more would be needed.
"""

from asyncfabric._gpu.driver import Driver, loaded_driver, open_driver
from asyncfabric._gpu.module import Function, Module

__all__ = ["Driver", "Function", "Module", "loaded_driver", "open_driver"]
