# dlpack.pxi: memory of other frameworks by DLPack (https://dmlc.github.io/dlpack/latest/c_api.html). The capsule is not
# consumed: it is kept as it came, and its own destructor gives the memory back. Struct layouts are those of ABI 1.x.


cdef extern from *:
    """
    namespace asyncfabric {
    struct DlDevice { int32_t type; int32_t id; };
    struct DlDataType { uint8_t code; uint8_t bits; uint16_t lanes; };
    struct DlTensor {
      void* data;
      DlDevice device;
      int32_t ndim;
      DlDataType dtype;
      int64_t* shape;
      int64_t* strides;  // in elements; null means C-contiguous
      uint64_t byte_offset;
    };
    struct DlVersioned {
      uint32_t major;
      uint32_t minor;
      void* manager_context;
      void (*deleter)(void*);
      uint64_t flags;  // bit 0: read-only
      DlTensor tensor;
    };
    }  // namespace asyncfabric
    """
    ctypedef struct DlDevice "asyncfabric::DlDevice":
        int32_t type
        int32_t id

    ctypedef struct DlDataType "asyncfabric::DlDataType":
        uint8_t bits
        uint16_t lanes

    ctypedef struct DlTensor "asyncfabric::DlTensor":
        void* data
        DlDevice device
        int32_t ndim
        DlDataType dtype
        int64_t* shape
        int64_t* strides
        uint64_t byte_offset

    ctypedef struct DlVersioned "asyncfabric::DlVersioned":
        uint32_t major
        uint64_t flags
        DlTensor tensor


cdef enum:
    DL_CPU = 1
    DL_CUDA = 2
    DL_CUDA_HOST = 3
    DL_READ_ONLY = 1


cdef object dlpack_capsule(object obj):
    """Ask for a versioned capsule, which knows about read-only memory; older producers do not know the argument."""
    try:
        return obj.__dlpack__(max_version=(1, 0))
    except TypeError:
        return obj.__dlpack__()


cdef object resolve_dlpack(object obj):
    """Resolve a DLPack producer on the host or a CUDA device."""
    cdef DlTensor* tensor
    cdef DlVersioned* versioned
    cdef bint readonly = False
    cdef int64_t elements = 1, expected = 1
    cdef bint dense = True
    cdef int i
    device_type = int(obj.__dlpack_device__()[0])
    if device_type not in (DL_CPU, DL_CUDA, DL_CUDA_HOST):
        raise TypeError(f"{type(obj).__name__} lies on DLPack device type {device_type}: host and CUDA memory only")
    capsule = dlpack_capsule(obj)
    if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        versioned = <DlVersioned*> PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        if versioned.major != 1:
            raise TypeError(f"{type(obj).__name__} speaks DLPack {versioned.major}, this build knows version 1")
        tensor = &versioned.tensor
        readonly = (versioned.flags & DL_READ_ONLY) != 0
    else:
        tensor = <DlTensor*> PyCapsule_GetPointer(capsule, b"dltensor")
    for i in range(tensor.ndim - 1, -1, -1):
        dense = dense and (tensor.strides == NULL or tensor.shape[i] == 1 or tensor.strides[i] == expected)
        expected *= tensor.shape[i]
        elements *= tensor.shape[i]
    if not dense and elements != 0:
        shape = [tensor.shape[i] for i in range(tensor.ndim)]
        raise not_contiguous(obj, shape, [tensor.strides[i] for i in range(tensor.ndim)], "elements")
    length_bytes = (elements * tensor.dtype.bits * tensor.dtype.lanes + 7) // 8
    device = tensor.device.id if device_type == DL_CUDA else kHostDevice
    return Buffer(<uintptr_t> tensor.data + tensor.byte_offset, length_bytes, device, bool(readonly), capsule)
