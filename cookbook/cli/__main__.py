"""`submit.py` under the Python that starts this, such as a container's: python -m cookbook.cli."""

import sys

from cookbook.cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
