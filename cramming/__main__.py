"""The console script, `python -m cramming` and `torchrun -m cramming`."""

from cramming.cli import main

if __name__ == "__main__":
    main()
