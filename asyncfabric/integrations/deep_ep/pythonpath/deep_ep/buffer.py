"""The module `deep_ep.buffer` for programs whose PYTHONPATH begins with the folder above.

Names only.
"""

from asyncfabric.integrations.deep_ep import Buffer

__all__ = ["Buffer"]
