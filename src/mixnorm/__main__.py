"""The command ``mixnorm``, also as ``python -m mixnorm``: the laboratory's, which needs more packages than the layers."""

import sys


def main() -> None:
    try:
        from mixnorm_lab.cli import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("mixnorm_lab", "rich", "typer"):
            raise
        print(
            "The command line needs typer and rich: install the extra, pip install '.[tools]' from a checkout of mixnorm",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    run()


if __name__ == "__main__":
    main()
