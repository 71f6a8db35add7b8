"""`python -m retouch`."""

from retouch.cli import main

if __name__ == "__main__":
    main()
