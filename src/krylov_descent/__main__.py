"""``python -m krylov_descent`` is the command ``krylov-descent``."""

import sys

from krylov_descent.cli import main

if __name__ == "__main__":
    sys.exit(main())
