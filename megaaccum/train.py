"""`python -m megaaccum.train --config CONFIG [--key value ...]` is the command `megaaccum train`."""

import sys

from megaaccum.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
