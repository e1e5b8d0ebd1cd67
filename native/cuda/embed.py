"""Turns the PTX of copy_pieces.cu into a header; part of `make ptx`. Usage: embed.py IN.ptx OUT.h.

The version is lowered to 7.0, which the text needs no more than: drivers from CUDA 11 on compile it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HEAD = """\
// kernel_text.h: native/cuda/copy_pieces.cu as PTX, made by `make ptx`;
// the driver compiles it when a rail opens. Do not edit.
#pragma once

namespace asyncfabric::cuda {

inline constexpr char kKernelText[] = R"PTX(
"""
TAIL = """
)PTX";

}  // namespace asyncfabric::cuda
"""

text = Path(sys.argv[1]).read_text()
text = re.sub(r"^\.version .*$", ".version 7.0", text[text.index(".version") :], flags=re.MULTILINE)
Path(sys.argv[2]).write_text(HEAD + text.rstrip() + TAIL)
