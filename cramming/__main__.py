"""`python -m cramming` and `torchrun -m cramming`: the same as the console script."""

from cramming.cli import main

main()
