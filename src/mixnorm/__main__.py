"""``python -m mixnorm`` is the command ``mixnorm``."""

from mixnorm.cli import main

if __name__ == "__main__":
    main()
