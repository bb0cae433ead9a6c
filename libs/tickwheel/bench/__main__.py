"""Every benchmark, measured against its budget. `python -m tickwheel.bench`, `tickwheel bench`, `make bench`.

Runs on the embedded parts, everything on the same cores, fsync on. A report with plots goes to build/bench/.
"""

from tickwheel.bench.report import main

if __name__ == "__main__":
    main()
