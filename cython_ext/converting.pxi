# converting.pxi: matrices of weights cast, quantised and measured, over numpy arrays, without the GIL.


cdef object plane_refused(str what):
    return ValueError(f"{what}: sizes do not fit each other, or these kinds are not converted here")


cdef Plane plane_of(const unsigned char[:, :] source, uint32_t kind) except *:
    cdef Plane plane
    if source.strides[1] != 1:
        raise plane_refused("bytes of a row are not next to each other")
    plane.data = &source[0, 0] if source.shape[0] and source.shape[1] else NULL
    plane.rows = source.shape[0]
    plane.row_bytes = source.shape[1]
    plane.stride = source.strides[0]
    plane.kind = <RowKind> kind
    return plane


cdef PlaneTarget plane_into(unsigned char[:, :] target, bint turned) except *:
    cdef PlaneTarget out
    if target.strides[1] != 1:
        raise plane_refused("bytes of a row are not next to each other")
    out.data = &target[0, 0] if target.shape[0] and target.shape[1] else NULL
    out.rows = target.shape[0]
    out.row_bytes = target.shape[1]
    out.stride = target.strides[0]
    out.turned = turned
    return out


class converting:  # a namespace
    """See asyncfabric._kernels.converting."""

    @staticmethod
    def cast(const unsigned char[:, :] source, uint32_t kind, uint32_t to, unsigned char[:, :] target,
             bint turned) -> None:
        """Cast a plane; `turned`: rows of the target are its columns."""
        cdef Plane plane = plane_of(source, kind)
        cdef PlaneTarget out = plane_into(target, turned)
        cdef bint fine
        with nogil:
            fine = native_cast_plane(plane, <RowKind> to, out)
        if not fine:
            raise plane_refused("cast")

    @staticmethod
    def quantise(const unsigned char[:, :] source, uint32_t kind, size_t row, size_t column,
                 const float[:, ::1] scales, unsigned char[:, :] target, bint turned) -> None:
        """Quantise a plane to float8_e4m3fn that begins at (row, column) of its first block; `turned` as in cast."""
        cdef Plane plane = plane_of(source, kind)
        cdef PlaneTarget out = plane_into(target, turned)
        cdef size_t count = scales.shape[0] * scales.shape[1]
        cdef const_floats given = const_floats(&scales[0, 0] if count else NULL, count)
        cdef bint fine
        with nogil:
            fine = native_quantise_plane(plane, row, column, given, out)
        if not fine:
            raise plane_refused("quantise")

    @staticmethod
    def measure(const unsigned char[:, :] source, uint32_t kind, size_t row, size_t column,
                float[:, ::1] maxima) -> None:
        """Write the largest absolute value of each block that a plane touches, which begins so in its first one."""
        cdef Plane plane = plane_of(source, kind)
        cdef size_t count = maxima.shape[0] * maxima.shape[1]
        cdef floats found = floats(&maxima[0, 0] if count else NULL, count)
        cdef bint fine
        with nogil:
            fine = native_measure_plane(plane, row, column, found)
        if not fine:
            raise plane_refused("measure")
