"""``python -m shape_sweeps``."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from .cli import main

        code = main()
    except KeyboardInterrupt:  # before or after what main itself guards
        code = 130
    sys.exit(code)
