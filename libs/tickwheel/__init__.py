"""tickwheel: a distributed job scheduler. `tickwheel.client` calls it, `tickwheel.worker` works for it."""

__version__ = "0.1.0"
