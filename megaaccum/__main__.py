"""`python -m megaaccum` is the command `megaaccum`."""

import sys

from megaaccum.cli import main

if __name__ == "__main__":
    sys.exit(main())
