"""`python -m tickwheel.services.coordinator`."""

from tickwheel.services.coordinator.main import main

main()
