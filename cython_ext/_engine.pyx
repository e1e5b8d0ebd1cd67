# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
# cython: embedsignature=True, binding=True
# distutils: language = c++
# _engine.pyx: contents of the one extension module. Each room is a file of one idea and may use an earlier one.
# The border translates and holds lifetimes: no policy, no await, no Python object per page.
"""The compiled border to the native engine. `asyncfabric._bridge.native` and `_kernels.native` import it."""

import collections
import os
import sys
import weakref

from cpython.buffer cimport (
    PyBUF_FORMAT,
    PyBUF_ND,
    PyBUF_SIMPLE,
    PyBUF_STRIDED,
    PyBUF_STRIDED_RO,
    PyBUF_WRITABLE,
    PyBuffer_FillInfo,
    PyBuffer_IsContiguous,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport strerror
from libcpp.memory cimport unique_ptr
from libcpp.pair cimport pair
from libcpp.string cimport string
from libcpp.unordered_map cimport unordered_map
from libcpp.vector cimport vector

from batches_api cimport *
from bench_api cimport *
from converting_api cimport *
from engine_api cimport *
from ordering_api cimport *
from rails_api cimport *
from rows_api cimport *
from summing_api cimport *
from topology_api cimport *

from asyncfabric._bridge.engine import Completion as CompletionTuple
from asyncfabric._bridge.engine import EngineStatusError
from asyncfabric._bridge.engine import KeyInfo as KeyInfoTuple
from asyncfabric._bridge.engine import OpProgress as OpProgressTuple
from asyncfabric._bridge.engine import ClosingInfo as ClosingInfoTuple
from asyncfabric._bridge.engine import RegionInfo as RegionInfoTuple
from asyncfabric._bridge.secret import secret_bytes
from asyncfabric.config import POLLING_NUMBERS

include "status.pxi"
include "config.pxi"
include "buffer.pxi"
include "dlpack.pxi"
include "memory.pxi"
include "hold.pxi"
include "control.pxi"
include "submit.pxi"
include "counters.pxi"
include "completions.pxi"
include "engine.pxi"
include "bench.pxi"
include "bench_engine.pxi"
include "topology.pxi"
include "rows/rows.pxi"
include "rows/records.pxi"
include "picking.pxi"
include "summing.pxi"
include "converting.pxi"
