"""`python -m glance`: the same as the `glance` command."""

from glance.cli import main

raise SystemExit(main())
