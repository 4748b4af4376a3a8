"""`python -m kgorch.cli`: the same as `kgorch`."""

from kgorch.cli import main

main()
