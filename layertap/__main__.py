"""The command line, as `python -m layertap`."""

from layertap import main

if __name__ == "__main__":
    main()
