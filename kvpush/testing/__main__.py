"""``python -m kvpush.testing``."""

import sys

from kvpush.testing.command_line import main

if __name__ == "__main__":
    sys.exit(main())
