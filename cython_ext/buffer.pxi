# buffer.pxi: what users hold becomes (address, length, device). Runs with the GIL, at registration only.
# torch is never imported here: an object can only be a tensor when its owner imported torch already.

Buffer = collections.namedtuple("Buffer", ("address", "length_bytes", "device", "readonly", "keepalive"))
Buffer.__doc__ = "Memory that a user's object owns; `device` is -1 for the host, else the CUDA ordinal."


cdef class _Export:
    """Holds a buffer export, so that the exporter neither moves nor frees its memory (a bytearray cannot resize)."""

    cdef Py_buffer view_
    cdef bint held_

    def __dealloc__(self):
        if self.held_:
            PyBuffer_Release(&self.view_)


cdef object not_contiguous(object obj, object shape, object strides, str unit):
    """Build the error for memory with gaps or in another order than its indices."""
    return ValueError(f"{type(obj).__name__} of shape {tuple(shape)} and strides {tuple(strides)} {unit} is not "
                      f"C-contiguous; register a contiguous copy or the whole base buffer")


cdef object resolve_tensor(object tensor, object torch):
    """Resolve a torch tensor; the keepalive is a detached twin, which survives `tensor.data = other`."""
    cdef str kind = tensor.device.type
    if tensor.layout != torch.strided:
        raise TypeError(f"a tensor of layout {tensor.layout} has no single range of memory")
    if kind != "cpu" and kind != "cuda":
        raise TypeError(f"a tensor on device {tensor.device} cannot be registered: host and CUDA memory only")
    if not tensor.is_contiguous():
        raise not_contiguous(tensor, tensor.shape, tensor.stride(), "elements")
    device = kHostDevice if kind == "cpu" else tensor.device.index
    length_bytes = tensor.numel() * tensor.element_size()
    return Buffer(tensor.data_ptr(), length_bytes, device, False, tensor.detach())


cdef object resolve_export(object obj):
    """Resolve an object with the buffer protocol; a writable export is asked for first."""
    cdef _Export export = _Export.__new__(_Export)
    cdef Py_ssize_t i
    try:
        PyObject_GetBuffer(obj, &export.view_, PyBUF_STRIDED)
    except (BufferError, ValueError, TypeError):
        PyObject_GetBuffer(obj, &export.view_, PyBUF_STRIDED_RO)
    export.held_ = True
    if not PyBuffer_IsContiguous(&export.view_, b"C"):
        shape = [export.view_.shape[i] for i in range(export.view_.ndim)]
        strides = [export.view_.strides[i] for i in range(export.view_.ndim)]
        raise not_contiguous(obj, shape, strides, "bytes")
    return Buffer(<uintptr_t> export.view_.buf, export.view_.len, kHostDevice, bool(export.view_.readonly), export)


def resolve_buffer(obj):
    """Resolve host or CUDA memory to `Buffer(address, length_bytes, device, readonly, keepalive)`.

    Takes torch tensors of any dtype, numpy arrays, bytearray, memoryview, any buffer exporter, and DLPack.
    The memory stays where it is while `keepalive` is held.

    Raises:
        TypeError: the object gives no memory, or memory of an unknown device.
        ValueError: the memory is not C-contiguous; the text names shape and strides.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        return resolve_tensor(obj, torch)
    if PyObject_CheckBuffer(obj):
        return resolve_export(obj)
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        return resolve_dlpack(obj)
    raise TypeError(f"{type(obj).__name__} gives no memory: expected a tensor, an array, a bytearray, a memoryview, "
                    f"or an object with the buffer protocol or __dlpack__")
