"""The same command as `python -m ray_pipe.compare_sync`, spelled with a hyphen."""

import sys

from ray_pipe.compare_sync import main

if __name__ == "__main__":
    sys.exit(main())
