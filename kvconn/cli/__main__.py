"""``python -m kvconn.cli``."""

from kvconn.cli.main import main

if __name__ == "__main__":
    main()
