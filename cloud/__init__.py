"""Bytes, keys and notices: the parts of a cloud that the harness needs. Knows nothing of the harness.

Import the module that owns a name (`cloud.store`, `cloud.notice`, ...): this package re-exports nothing, so that a
poller never imports a store's client.
"""
