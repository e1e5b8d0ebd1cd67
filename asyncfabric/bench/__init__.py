"""Measure a fabric against the machine it runs on: workloads, limits and rows.

Used by `asyncfabric bench` and importable by anybody who wants the same figures from an own program. Workloads take an
open Fabric and move real, checked bytes; limits are bare native loops without a fabric. No processes are started here
and nothing is printed: that is the work of the command.
"""

from asyncfabric.bench.measure import Rate, percentiles_us
from asyncfabric.bench.pattern import page_list, random_bytes
from asyncfabric.bench.rows import Point

__all__ = ["Point", "Rate", "page_list", "percentiles_us", "random_bytes"]
