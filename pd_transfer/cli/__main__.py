"""``python -m pd_transfer.cli``, for where the script ``pdt`` is not on the path."""

import sys

from pd_transfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
