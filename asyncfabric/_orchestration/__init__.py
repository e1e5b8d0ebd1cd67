"""Actors, mailboxes, supervision, peer keeping, the region ledger and membership: who runs, who restarts whom.

Runs on trio, on the event loop's thread. Moves no bytes of users; the public door is `asyncfabric.actors`.
"""
