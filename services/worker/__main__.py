"""`python -m tickwheel.services.worker`."""

from tickwheel.services.worker.main import main

if __name__ == "__main__":
    main()
