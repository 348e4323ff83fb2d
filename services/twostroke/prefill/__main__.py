"""Entry point of a prefill worker."""

import sys

from twostroke.worker.__main__ import main

if __name__ == "__main__":
    sys.exit(main(role="prefill"))
