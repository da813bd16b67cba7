"""The console script, `python -m cramming` and `torchrun -m cramming`."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C prints one line, even during the imports."""
    try:
        from cramming import cli
    except KeyboardInterrupt:
        print("cramming: interrupted", file=sys.stderr)
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
