"""`python -m convgrad` is the command `convgrad`."""

from .cli import main

raise SystemExit(main())
