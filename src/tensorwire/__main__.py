"""`python -m tensorwire`: the command without its script."""

from tensorwire.cli import main

if __name__ == "__main__":
    main()
