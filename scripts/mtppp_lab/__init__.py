"""The parts of `scripts/lab`. Standard library only: it has to run before anything is installed."""
