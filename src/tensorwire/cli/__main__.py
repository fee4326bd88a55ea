"""`python -m tensorwire.cli`: the command without its script."""

from tensorwire.cli import main

main()
