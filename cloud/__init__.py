"""Bytes, keys and notices: what the harness needs of a cloud, and nothing of the harness.

Import the module that owns the thing (`cloud.store`, `cloud.notice`, ...): this package re-exports nothing, so that a
poller never pays for a store's client.
"""
