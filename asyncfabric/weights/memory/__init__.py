"""Host and GPU memory behind one small interface, `Device`: how rows lie, converting, checksums."""
