"""`python -m orchestrator.cli`: the same as `kgorch`."""

from orchestrator.cli import main

main()
