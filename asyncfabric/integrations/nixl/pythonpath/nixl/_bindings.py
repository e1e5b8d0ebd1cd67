"""The module `nixl._bindings` for programs whose PYTHONPATH begins with the folder above.

Names only.
"""

from asyncfabric.integrations.nixl._bindings import *  # noqa: F403  # the same names, by their __all__
