"""``python -m kvpush``: the command line."""

import sys

from kvpush.cli.main import main

if __name__ == "__main__":  # engine processes of the demo import this module again
    sys.exit(main())
