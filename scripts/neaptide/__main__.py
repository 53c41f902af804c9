"""``python -m neaptide`` is the console command."""

import sys

from neaptide.cli import main

if __name__ == "__main__":
    sys.exit(main())
