"""`python -m sparsebalance` is the command line."""

import sys

from sparsebalance.cli import main

sys.exit(main())
