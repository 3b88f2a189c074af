"""`python -m gpulayer` is `gpulayer`."""

from gpulayer.cli import main

if __name__ == "__main__":
    main()
