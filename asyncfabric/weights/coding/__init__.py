"""Lossless codings of weights on their way: less to send where the wire is slower than a core. A public door; no logic.

`delta` sends what changed since the version that the receiver holds, `exponent` packs the exponents of floating
numbers, `choice` measures a sample and says which of them pays, if any does.
"""

from asyncfabric.weights.coding.choice import KNOWN, Coding, Costs, choose, common, measure
from asyncfabric.weights.coding.delta import apply_delta, encode_delta
from asyncfabric.weights.coding.exponent import decode_exponents, encode_exponents

__all__ = [
    "KNOWN",
    "Coding",
    "Costs",
    "apply_delta",
    "choose",
    "common",
    "decode_exponents",
    "encode_delta",
    "encode_exponents",
    "measure",
]
