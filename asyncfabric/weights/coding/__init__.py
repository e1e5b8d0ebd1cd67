"""Lossless coding of rows: delta and exponent coding, the choice between them, and the lane that carries coded rows."""
