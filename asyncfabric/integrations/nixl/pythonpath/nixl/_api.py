"""The module `nixl._api` for programs whose PYTHONPATH begins with the folder above.

Names only.
"""

from asyncfabric.integrations.nixl._api import *  # noqa: F403  # the same names, by their __all__
