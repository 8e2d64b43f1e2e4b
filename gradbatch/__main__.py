"""``python -m gradbatch``: the command, where it is not installed."""

from gradbatch.cli import main

main()
