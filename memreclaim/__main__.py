"""``python -m memreclaim``."""

from __future__ import annotations

import sys

from memreclaim.cli import main

if __name__ == "__main__":
    sys.exit(main())
