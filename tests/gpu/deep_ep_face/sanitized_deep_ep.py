"""A few calls of DeepEP's interface between two processes, for compute-sanitizer: `sanitized_deep_ep.py`.

`compute-sanitizer --target-processes all python tests/gpu/deep_ep_face/sanitized_deep_ep.py`. Ends with 1 if a case is
wrong or a rank fails.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.append(str(Path(__file__).parents[1]))

from deep_ep_rank import deep_ep_ranks

CASES = (
    ("low", 4, "bfloat16", 1, True),
    ("low", 10, "fp8", -1, False),
    ("other_scales", 512, 23, True),
    ("packed",),
    ("normal", 4, "float32", -1),
    ("normal", 10, "fp8", 0),
    ("elastic", 4, "bfloat16", 1),
    ("gradients", 4, "float32", -1, -1),
)
RANKS, DEADLINE_S = 2, 60.0


def main() -> int:
    """Run the cases; return the exit status."""
    with TemporaryDirectory() as folder, deep_ep_ranks(RANKS, Path(folder), gpu_deadline_s=DEADLINE_S) as found:
        for case in CASES:
            found.do(*case)
            print(*case, "is right", flush=True)
        found.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
