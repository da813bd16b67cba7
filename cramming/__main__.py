"""The console script, `python -m cramming` and `torchrun -m cramming`."""

import sys


def main() -> None:
    """The command line, from its first import on: Ctrl-C is one line at any time."""
    try:
        from cramming import cli
    except KeyboardInterrupt:
        print("cramming: interrupted", file=sys.stderr)
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
