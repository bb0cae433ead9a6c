"""`python -m tickwheel.cli …` is `tickwheel …`."""

from tickwheel.cli import main

main()
