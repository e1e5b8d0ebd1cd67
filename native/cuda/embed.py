"""Turns the PTX of a kernel into what is carried; part of `make ptx`. Usage: embed.py IN.ptx VERSION OUT.h|OUT.ptx.

The version is lowered to VERSION, which the text needs no more than: 7.0 for drivers from CUDA 11 on, 8.3 for drivers
from CUDA 12.3 on. A header holds the text as a string, for the library.
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

source, version, target = sys.argv[1:]
text = Path(source).read_text()
text = re.sub(r"^\.version .*$", f".version {version}", text[text.index(".version") :], flags=re.MULTILINE).rstrip()
Path(target).write_text(HEAD + text + TAIL if target.endswith(".h") else text + "\n")
