"""`python -m rayq.cli`: the same as `rayq`."""

from __future__ import annotations

from rayq.cli.main import main

if __name__ == "__main__":
    main()
