"""The one-command cluster.

A Postgres and an etcd of our own, from wheels, without root and without containers.
"""
