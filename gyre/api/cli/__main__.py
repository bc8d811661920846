"""`python -m gyre.api.cli`: the command line where the `gyre` script is not on the path."""

from gyre.api.cli import main

main()
