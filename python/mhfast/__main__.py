"""`python -m mhfast` is the console script `mhfast`."""

from .cli import main

raise SystemExit(main())
