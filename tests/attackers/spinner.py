"""A process that only takes a core; `siege.py` begins it, and counts what attacks cost beyond that."""

while True:
    pass
